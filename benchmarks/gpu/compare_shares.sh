# Policies of `pointsman serve` before two and three vLLM servers with unequal shares of one GPU; see shares.sh for OUT, TRACE, ...
#   compare_shares.sh start MODEL-FOLDER   servers with 60, 25 and (for three) 15 % of the card, and routers
#   compare_shares.sh predict              warms up all servers under each policy of WARM, calibrates each from all that traffic,
#                                          with what a neighbour's step costs it (OUT/three-PORT.yaml, OUT/two-PORT.yaml), and
#                                          writes down what the simulator says of the blocks: OUT/predicted-three.json, ...-two.json
#   compare_shares.sh blocks SECONDS       the next blocks of the list below, as long as these seconds last; again for the rest
# KINDS: 'three two', or one of them. CLOCK_MHZ fixes the card's clocks (as root), so that servers do not take each other's
# power; THREE_RATE and TWO_RATE are the requests/s of the warm-up; BLOCK_S is how long requests come in a block; LOAD is their
# share of the calibrated capacity; EXTRA=1 adds blocks of round-robin and some with free clocks at the end. ROUNDS and POLICIES say
# which blocks there are: POLICIES='least-outstanding default' leaves time for more rounds (ROUNDS='5 6 7 8', the same for predict).
here=$(cd "$(dirname "$0")" && pwd); out=${OUT:-results}; mkdir -p "$out"; python=${PYTHON:-python3}; pointsman=${POINTSMAN:-pointsman}
began=$(date +%s); seconds=${BLOCK_S:-40}; rounds=${ROUNDS:-5 6 7}; kinds=${KINDS:-three two}
policies=${POLICIES:-least-outstanding default late-binding}; warm=${WARM:-least-outstanding default late-binding}
three=8101,8102,8103; two=8101,8102; three_port=8110; two_port=8120; three_rate=${THREE_RATE:-14}; two_rate=${TWO_RATE:-12.5}
case $kinds in *three*) all=$three; shares="60 25 15" ;; *) all=$two; shares="60 25" ;; esac
since() { echo "  $(($(date +%s) - began)) s"; }
in_turn() {  # round, policies: every round begins with the next one
  local n=$(($1 % ($# - 1))); shift
  while [ $n -gt 0 ]; do set -- "${@:2}" "$1"; n=$((n - 1)); done
  echo $*
}
list() {  # name, traffic, router, servers, policy
  for round in $rounds; do
    for kind in $kinds; do
      port=${kind}_port
      for policy in $(in_turn $round $policies); do echo "${kind}_${round}_$policy $kind-$round ${!port} ${!kind} $policy"; done
    done
  done
  [ -z "$EXTRA" ] && return
  for kind in $kinds; do port=${kind}_port; echo "${kind}_5_round-robin $kind-5 ${!port} ${!kind} round-robin"; done
  if [ -n "$CLOCK_MHZ" ]; then  # the same with clocks as the card likes
    kind=${kinds%% *}; port=${kind}_port
    for round in $rounds; do
      for policy in least-outstanding default; do echo "free_${round}_$policy $kind-$round ${!port} ${!kind} $policy"; done
    done
  fi
}
block() {  # name, traffic, router, servers, policy
  timeout 170 $python "$here/router_blocks.py" block "$out/$2.jsonl" --name $1 --policy $5 --router $3 --admin $(($3 + 1)) \
    --servers $4 --out "$out" || echo "$1 has failed"
  since
}
backends() { for port in $(echo $1 | tr , ' '); do echo "--backend http://127.0.0.1:$port"; done; }
neighbours() { for port in $(echo $2 | tr , ' '); do [ $port = $1 ] || echo "--neighbour http://127.0.0.1:$port"; done; }
traffic() { $python "$here/block_traffic.py" single --trace "$TRACE" --out "$out/$1.jsonl" "${@:2}"; }
case $1 in
start)
  [ -n "$2" ] && bash "$here/shares.sh" up "$2" $shares
  [ -n "$CLOCK_MHZ" ] && nvidia-smi -lgc $CLOCK_MHZ,$CLOCK_MHZ
  # Whatever is compiled, is compiled while the servers start.
  head -n 200 "$here/h200/loads/load_0.3.csv" > "$out/tiny.csv"; $pointsman calibrate --traffic "$out/tiny.csv" > /dev/null 2>&1
  traffic tiny --rate 2 --seconds 5
  $python "$here/predict_blocks.py" "$out/tiny.jsonl" --servers "$here"/h200/shares/three-810?.yaml --runs 1 > /dev/null
  since
  for kind in $kinds; do
    port=${kind}_port; bash "$here/shares.sh" router ${!port} $kind --policy least-outstanding $(backends ${!kind}) || exit 1
  done
  $python "$here/router_blocks.py" wait $all || { tail -n 30 "$out"/vllm-*.log; exit 1; }
  since
  ;;
predict)
  $python "$here/router_blocks.py" busy $all --trace "$TRACE" --streams 16 --seconds ${FIRST_S:-10}  # what is done only once
  for kind in $kinds; do
    port=${kind}_port; rate=${kind}_rate; seed=1  # other arrivals and lengths than those of the judged blocks
    for policy in $warm; do
      traffic warm-$kind-$seed --rate ${!rate} --seconds ${WARM_S:-$seconds} --seed $seed
      block warm_${seed}_$kind-$policy warm-$kind-$seed ${!port} ${!kind} $policy
      seed=$((seed + 1))
    done
  done
  for kind in $kinds; do
    cp "$out/record-$kind.jsonl" "$out/warm-$kind-record.jsonl"
    for port in $(echo ${!kind} | tr , ' '); do
      $pointsman calibrate --url http://127.0.0.1:$port --traffic "$out/warm-$kind-record.jsonl" --out "$out/$kind-$port.yaml" \
        $(neighbours $port ${!kind}) 2>&1 &
    done
  done
  wait; since
  for kind in $kinds; do
    (
      files=; for round in $rounds; do
        traffic $kind-$round --servers "$out"/$kind-810?.yaml --load ${LOAD:-0.75} --seconds $seconds --seed $round
        files="$files $out/$kind-$round.jsonl"
      done
      $python -W ignore "$here/predict_blocks.py" $files --servers "$out"/$kind-810?.yaml --runs ${RUNS:-8} --out "$out/predicted-$kind.json" \
        --policies least-outstanding,default,late-binding,round-robin
    ) &
  done
  wait; since
  ;;
blocks)
  which nvidia-smi > /dev/null && { nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw --format=csv,noheader -l 2 >> "$out/clocks.csv" & watch=$!; }
  list | while read -r name traffic router servers policy; do
    [ -e "$out/$name.json" ] && continue
    [ $(($(date +%s) - began + seconds + 15)) -gt $2 ] && { echo "$name: no time left"; break; }
    case $name in free_*) nvidia-smi -rgc > /dev/null ;; *) [ -n "$CLOCK_MHZ" ] && nvidia-smi -lgc $CLOCK_MHZ,$CLOCK_MHZ > /dev/null ;; esac
    block $name $traffic $router $servers $policy
  done
  [ -n "$watch" ] && kill $watch
  ;;
*) sed -n '1,11s/^# *//p' "$0"; exit 2 ;;
esac
exit 0
