# Starts the ranks of one site of two; sourced by shared.sh here and in ../edge_cloud_mm. By environment variables:
#
# MASTER_ADDR, MASTER_PORT  where the edge listens
# NODES                     number of machines

export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" MASTER_PORT="${MASTER_PORT:-29511}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
PYTHON="${PYTHON:-python}"

# The rank numbers follow --node-rank: the edge is node 0 and so holds rank 0. (torchrun's dynamic rendezvous, c10d,
# numbers the nodes by their names.)
launch() { # NODE_RANK PROCESSES SITE SCRIPT [arguments...]
    local node="$1" processes="$2" site="$3" script="$4"
    shift 4
    exec "$PYTHON" -m torch.distributed.run --nnodes "${NODES:-2}" --node-rank "$node" --nproc-per-node "$processes" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        -m vtp_plugin run "$script" --vtp-site "$site" "$@"
}
