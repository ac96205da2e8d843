# Arguments that both sites must share; sourced by edge.sh and cloud.sh. Override by environment variables, on both sites.
# They are those of MindSpeed-MM's finetune_qwen2_5_vl_32b.sh, but for what docs/guides/mindspeed-mm.md lists.
#
# MINDSPEED_MM        folder of MindSpeed-MM; the scripts start there
# SIZE_LIST, DP_LIST  tensor-parallel size and number of replicas of every stage, the edge first
# SITES               site of every stage
# MODEL, TOOLS        JSON of the model, with the lists of its layers from write_model.py; JSON of MindSpeed-MM's tools
# WEIGHTS             what `checkpoint import` has written
# CHECKPOINT          a folder that both sites reach; a run resumes from what is there, else it begins with WEIGHTS
# SEQ_LENGTH, VOCAB_SIZE, GLOBAL_BATCH_SIZE, STEPS
# DEVICE_FLAGS        what depends on the devices
# SCRIPT              the training script

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$(dirname "$HERE")/edge_cloud/launch.sh"
cd "${MINDSPEED_MM:?name the folder of MindSpeed-MM}"

export CUDA_DEVICE_MAX_CONNECTIONS=1 HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1200}"
SCRIPT="${SCRIPT:-pretrain_vlm.py}"
WEIGHTS="${WEIGHTS:-ckpt/vtp/Qwen2.5-VL-32B-Instruct}" CHECKPOINT="${CHECKPOINT:-ckpt/vtp/trained}"
LOAD="$WEIGHTS"
if [ -e "$CHECKPOINT/latest_checkpointed_iteration.txt" ]; then LOAD="$CHECKPOINT"; fi
DEVICE_FLAGS="${DEVICE_FLAGS:---bf16 --use-flash-attn --distributed-backend nccl}"

SHARED=(
    --vtp-size-list "${SIZE_LIST:-2,4,4,4,4}" --vtp-dp-list "${DP_LIST:-1,2,2,2,2}"
    --layerwise-disaggregated-training --vtp-sites "${SITES:-edge,cloud,cloud,cloud,cloud}"
    --mm-model "${MODEL:-ckpt/vtp/model_32b.json}" --mm-tool "${TOOLS:-mindspeed_mm/tools/tools.json}"
    --load "$LOAD" --save "$CHECKPOINT" --ckpt-format torch_dist --save-interval 100
    --seq-length "${SEQ_LENGTH:-1024}" --variable-seq-lengths
    --micro-batch-size 1 --global-batch-size "${GLOBAL_BATCH_SIZE:-96}" --train-iters "${STEPS:-10000}"
    --use-mcore-models --tokenizer-type NullTokenizer --vocab-size "${VOCAB_SIZE:-152064}"
    --make-vocab-size-divisible-by 1 --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-fused-swiglu
    --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --lr 1.0e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0 --clip-grad 0.0
    --adam-beta1 0.9 --adam-beta2 0.999 --use-distributed-optimizer --seed 42
    --log-interval 1 --eval-interval 10000 --eval-iters 0
)
read -ra OF_DEVICE <<<"$DEVICE_FLAGS"
SHARED+=("${OF_DEVICE[@]}")
