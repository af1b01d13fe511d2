# Policies of `pointsman serve` before two and three vLLM servers with unequal shares of one GPU; see shares.sh for OUT, TRACE, ...
#   compare_shares.sh start MODEL-FOLDER   servers with 60, 25 and 15 % of the card, routers; then calibrates each server beside
#                                          busy neighbours: OUT/three-PORT.yaml, OUT/two-PORT.yaml
#   compare_shares.sh alone                calibrates two of them while the others are idle: OUT/alone-PORT.yaml
#   compare_shares.sh blocks SECONDS       the next blocks of the list below, as long as these seconds last; again for the rest
# Before the blocks, `predict_blocks.py` can say from the same files what will come out.
here=$(cd "$(dirname "$0")" && pwd); out=${OUT:-results}; mkdir -p "$out"; python=${PYTHON:-python3}
began=$(date +%s); BLOCK_S=60  # a block of 40 s, and until it has drained
calibrate() { bash "$here/shares.sh" "$@"; }
list() {  # name, traffic, router, policy
  for round in 5 6; do
    policies="least-outstanding default late-binding gathering"
    [ $round = 6 ] && policies="gathering late-binding default least-outstanding"
    for policy in $policies; do echo "three_${round}_$policy three-$round 8110 8101,8102,8103 $policy"; done
  done
  for policy in least-outstanding default; do echo "chats_5_$policy chats-5 8110 8101,8102,8103 $policy"; done
  for round in 5 6; do
    policies="least-outstanding default late-binding gathering"
    [ $round = 6 ] && policies="gathering late-binding default least-outstanding"
    [ $round = 5 ] && echo "two_${round}_told two-$round 8130 8101,8102 default"
    for policy in $policies; do echo "two_${round}_$policy two-$round 8120 8101,8102 $policy"; done
    [ $round = 6 ] && echo "two_${round}_told two-$round 8130 8101,8102 default"
  done
  echo "two_5_round-robin two-5 8120 8101,8102 round-robin"
  echo "three_5_round-robin three-5 8110 8101,8102,8103 round-robin"
  echo "chats_5_cache-aware chats-5 8110 8101,8102,8103 cache-aware"
}
backends() { for port in "$@"; do echo "--backend http://127.0.0.1:$port"; done; }
case $1 in
start)
  bash "$here/shares.sh" up "$2" 60 25 15
  bash "$here/shares.sh" router 8110 three --policy least-outstanding $(backends 8101 8102 8103) || exit 1
  bash "$here/shares.sh" router 8120 two --policy least-outstanding $(backends 8101 8102) || exit 1
  echo "routers after $(($(date +%s) - began)) s"
  $python "$here/router_blocks.py" wait 8101,8102,8103 || { tail -n 30 "$out"/vllm-*.log; exit 1; }
  calibrate beside three 30 8101 8102 8103; calibrate beside three 45 8102 8101 8103; calibrate beside three 60 8103 8101 8102
  calibrate beside two 30 8101 8102; calibrate beside two 40 8102 8101
  echo "calibrated after $(($(date +%s) - began)) s"
  ;;
alone)
  calibrate alone alone 20 8101; calibrate alone alone 30 8102
  ;;
blocks)
  if [ ! -e "$out/chats-5.jsonl" ]; then
    for round in 5 6; do
      $python "$here/block_traffic.py" single --trace "$TRACE" --servers "$out"/three-810[123].yaml --seed $round --out "$out/three-$round.jsonl"
      $python "$here/block_traffic.py" single --trace "$TRACE" --servers "$out"/two-810[12].yaml --seed $round --out "$out/two-$round.jsonl"
    done
    $python "$here/block_traffic.py" chats --servers "$out"/three-810[123].yaml --load 1 --seed 5 --out "$out/chats-5.jsonl"
    $python -c 'import json, sys, yaml
print(json.dumps({"backends": [yaml.safe_load(open(path))["backends"][0] for path in sys.argv[1:]]}))' "$out"/two-810[12].yaml > "$out/told.yaml"
    bash "$here/shares.sh" router 8130 told --policy default --backends "$out/told.yaml" || exit 1
  fi
  which nvidia-smi > /dev/null && { nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw --format=csv,noheader -l 5 >> "$out/clocks.csv" & watch=$!; }
  list | while read -r name traffic router servers policy; do
    [ -e "$out/$name.json" ] && continue
    [ $(($(date +%s) - began + BLOCK_S)) -gt $2 ] && { echo "$name: no time left"; break; }
    timeout 150 $python "$here/router_blocks.py" block "$out/$traffic.jsonl" --name $name --policy $policy --router $router --admin $((router + 1)) \
      --servers $servers --out "$out" || echo "$name has failed"
    echo "  $(($(date +%s) - began)) s"
  done
  [ -n "$watch" ] && kill $watch
  ;;
*) sed -n '1,6s/^# *//p' "$0"; exit 2 ;;
esac
exit 0
