# Sourced by the recipes. Where ASK names a command of the plugin, it answers in the place of the run, for these flags:
#
#   ASK=plan                                    the recipe's layout: ranks, what crosses, memory, what to start on each
#                                               node, or with ASK="plan --slurm" a batch script; also draw and simulate
#   ASK="plan --have 8,6 --card-memory 80GiB"   which layout suits nodes with so many GPUs
#   ASK="search --cluster FILE.toml"            which one is fastest on these machines

case "${ASK:-}" in
"") ;;
*--have* | search*) exec python -m vtp_plugin $ASK "${FLAGS[@]}" ;; # $ASK are several words
plan*) exec python -m vtp_plugin $ASK --nodes "$(IFS=, && echo "${RANKS[*]}")" "${STAGES[@]}" "${FLAGS[@]}" ;;
*) exec python -m vtp_plugin $ASK "${STAGES[@]}" "${FLAGS[@]}" ;;
esac
