#!/usr/bin/env bash
# Trains a small Qwen with ms-swift's `megatron sft` on stages of 1 and 2 ranks, on the CPUs of this machine, for five
# steps. Needs the environment that `make env HOST=swift` makes. SIZES=1,1 has equal stages, and gives the same losses.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export SIZES=${SIZES:-1,2} OUT=${OUT:-out/ms_swift} BIN=${BIN:-.venv-swift/bin}
export PYTHONPATH=$PWD:$PWD/tests/swift/stand_in OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1
# What differs from ms-swift's own examples: three variables and --external_plugins.
export VTP_FLAGS="--vtp-size-list $SIZES --vtp-device cpu" NPROC_PER_NODE=$((${SIZES//,/+}))
[[ -e $OUT/data.jsonl ]] || "$BIN/python" -m tests.swift.small_model "$OUT" qwen2
"$BIN/megatron" sft --external_plugins "$("$BIN/python" -m vtp_plugin path swift)" \
    --model "$OUT/qwen2" --model_type qwen2 --template chatml --dataset "$OUT/data.jsonl" --output_dir "$OUT/run-$SIZES" \
    --tuner_type full --sequence_parallel true --micro_batch_size 2 --global_batch_size 8 --train_iters 5 --lr 1e-3 \
    --max_length 96 --logging_steps 1 --save_safetensors true --no_save_optim true --no_save_rng true --add_version false \
    --torch_dtype float32 --fp16 false --bf16 false --ddp_backend gloo --attention_backend local --check_model false \
    --masked_softmax_fusion false --bias_activation_fusion false --gradient_accumulation_fusion false \
    --cross_entropy_loss_fusion false --dataloader_num_workers 0 --split_dataset_ratio 0 "$@"
