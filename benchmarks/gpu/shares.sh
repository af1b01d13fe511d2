# Several vLLM servers on one GPU, each with a share of its multiprocessors (CUDA MPS), and `pointsman serve` before them.
#   shares.sh up MODEL-FOLDER SHARE...          MPS and one server a share, on ports 8101, 8102, ...; does not wait
#   shares.sh alone NAME SECONDS PORT           calibrates a server while nothing else runs: OUT/NAME-PORT.yaml
#   shares.sh beside NAME SECONDS PORT PORT...  the same while each of the other ports serves 45 streams
#   shares.sh router PORT NAME-OF-LOG SERVE-OPTIONS...    starts a router (admin port: PORT + 1) and waits for it
#   shares.sh down                              ends all that this script has started
# OUT is where results go (default: results); VLLM and POINTSMAN are the commands; KV_BYTES is the KV memory of a server;
# TRACE is an Azure trace, whose lengths a busy neighbour serves.
here=$(cd "$(dirname "$0")" && pwd); out=${OUT:-results}; mkdir -p "$out/pids"; step=$1; shift
vllm=${VLLM:-vllm}; pointsman=${POINTSMAN:-pointsman}; python=${PYTHON:-python3}
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mpslog
case $step in
up)
  model=$1; shift; port=8101
  mkdir -p /tmp/mps /tmp/mpslog; setsid nvidia-cuda-mps-control -d < /dev/null > /dev/null 2>&1; sleep 1
  for share in "$@"; do
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$share setsid $vllm serve "$model" --served-model-name llama --host 127.0.0.1 --port $port \
      --max-model-len 8192 --load-format dummy --skip-tokenizer-init --enable-prefix-caching --enable-prompt-tokens-details \
      --gpu-memory-utilization 0.3 --kv-cache-memory-bytes ${KV_BYTES:-24000000000} --uvicorn-log-level warning \
      > "$out/vllm-$port.log" 2>&1 &
    echo $! > "$out/pids/vllm-$port"; port=$((port + 1))
  done
  ;;
alone|beside)
  name=$1; seconds=$2; port=$3; shift 3
  if [ $step = beside ]; then
    $python "$here/router_blocks.py" busy $(echo $* | tr ' ' ,) --trace "$TRACE" --seconds $((seconds + 15)) & neighbours=$!
    sleep 5  # until they are as busy as they will be
  fi
  $pointsman calibrate --url http://127.0.0.1:$port --minutes $(awk "BEGIN { print $seconds / 60 }") --out "$out/$name-$port.yaml" 2>&1
  [ -n "$neighbours" ] && { kill -INT $neighbours 2> /dev/null; wait $neighbours; }
  ;;
router)
  port=$1; name=$2; shift 2
  setsid $pointsman serve --port $port --admin-port $((port + 1)) --record "$out/record-$name.jsonl" "$@" \
    > "$out/router-$name.out" 2> "$out/router-$name.log" &
  pid=$!; echo $pid > "$out/pids/router-$name"
  until curl -s -o /dev/null http://127.0.0.1:$port/metrics; do
    kill -0 $pid 2> /dev/null || { echo "the router has ended"; tail -n 20 "$out/router-$name.out" "$out/router-$name.log"; exit 1; }
    sleep 0.2
  done
  ;;
down)
  for file in "$out"/pids/*; do kill -TERM $(cat "$file") 2> /dev/null; rm "$file"; done
  echo quit | timeout 10 nvidia-cuda-mps-control
  ;;
*) sed -n '2,9s/^# *//p' "$0"; exit 2 ;;
esac
