#!/usr/bin/env bash
# One node's health, run by srun on every node before each attempt. Prints `healthy NODE …` or one line
# `unhealthy NODE REASON` for each finding, and exits with 1 when there is any. Limits are set in site.env.
#
# The GPU part (nvidia-smi: count, uncorrectable ECC errors, temperature, recent XIDs) runs where nvidia-smi is
# installed. It has not been run on a GPU node by this repository's tests.
set -uo pipefail

NODE=${SLURMD_NODENAME:-$(hostname)}
FINDINGS=0
finding() {
    echo "unhealthy $NODE $*"
    FINDINGS=$((FINDINGS + 1))
}

check_disk() { # PATH GIB: free space
    local free
    free=$(df --output=avail --block-size=1G "$1" | tail -1 | tr -d ' ') || { finding "$1 cannot be read"; return; }
    [ "$free" -ge "$2" ] || finding "$1 has $free GiB free, less than $2"
}

check_shared() { # what this node writes in the run directory can be read back
    local file=$RUN/logs/.health-$NODE
    if ! echo "$NODE" >"$file" || [ "$(cat "$file")" != "$NODE" ]; then finding "$RUN cannot be written and read"; fi
    rm -f "$file"
}

check_clock() { # against the file server's clock, by the time of a file written now
    local file=$RUN/logs/.clock-$NODE skew
    touch "$file" || return
    skew=$(($(date +%s) - $(stat --format=%Y "$file")))
    rm -f "$file"
    [ "${skew#-}" -le "${HEALTH_MAX_CLOCK_SKEW:-5}" ] || finding "clock is off by $skew s"
}

check_memory() {
    local free
    free=$(($(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 1048576))
    [ "$free" -ge "${HEALTH_MIN_MEMORY_GIB:-1}" ] || finding "$free GiB of memory free, less than ${HEALTH_MIN_MEMORY_GIB:-1}"
}

check_gpus() {
    local wanted=${SLURM_GPUS_ON_NODE:-0} rows index ecc temperature
    command -v nvidia-smi >/dev/null || return 0
    rows=$(timeout 60 nvidia-smi --format=csv,noheader,nounits \
        --query-gpu=index,ecc.errors.uncorrected.volatile.total,temperature.gpu) || { finding "nvidia-smi failed"; return; }
    [ "$(grep -c . <<<"$rows")" -ge "$wanted" ] || finding "$(grep -c . <<<"$rows") GPUs instead of $wanted"
    while IFS=', ' read -r index ecc temperature; do
        [[ ! $ecc =~ ^[0-9]+$ ]] || [ "$ecc" = 0 ] || finding "GPU $index: $ecc uncorrectable ECC errors"
        [ "$temperature" -le "${HEALTH_MAX_GPU_CELSIUS:-88}" ] || finding "GPU $index: $temperature °C"
    done <<<"$rows"
    # XIDs of the last hour that mean the device must be reset (48, 63, 64, 74, 79, 94, 95); readable by root only.
    rows=$(journalctl --dmesg --since=-1h 2>/dev/null | grep -oE 'NVRM: Xid[^,]*: (48|63|64|74|79|94|95)' | sort -u)
    [ -z "$rows" ] || finding "kernel log: $(paste -sd';' <<<"$rows")"
}

check_matmul() { # a slow device holds up all others; torch takes seconds to import, so only where a floor is set
    local told
    [ -n "${HEALTH_MIN_TFLOPS:-}" ] || return 0
    told=$(PYTHONSAFEPATH=1 PYTHONPATH=$CODE timeout 300 "$PYTHON" -m launch.matmul "$HEALTH_MIN_TFLOPS" 2>&1) ||
        finding "matrix product: $(tail -1 <<<"$told")"
}

check_allreduce() { # between the node's devices, then with each neighbour; also where nodes without GPUs set a floor
    local floor=${HEALTH_MIN_ALLREDUCE_GBPS:-} told
    [ -n "$floor" ] || { command -v nvidia-smi >/dev/null && [ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ] && floor=100; }
    [ -n "$floor" ] && [ "$floor" != 0 ] || return 0
    if told=$(PYTHONSAFEPATH=1 PYTHONPATH=$CODE timeout 600 "$PYTHON" -m launch.allreduce \
        "$floor" "${HEALTH_MIN_LINK_GBPS:-$(awk "BEGIN { print $floor / 10 }")}" 2>&1); then
        grep '^weak link' <<<"$told"
    else
        finding "all-reduce: $(tail -1 <<<"$told")"
    fi
}

check_disk "$RUN" "${HEALTH_MIN_RUN_GIB:-1}"
check_disk "${TMPDIR:-/tmp}" "${HEALTH_MIN_TMP_GIB:-1}"
check_memory
check_shared
check_clock
check_gpus
check_matmul
check_allreduce
if [ -n "${HEALTH_EXTRA:-}" ]; then # a site's own check: a command; its output names what is wrong
    reason=$(bash -c "$HEALTH_EXTRA" 2>&1) || finding "$(tr '\n' ' ' <<<"$reason")"
fi
[ "$FINDINGS" = 0 ] && echo "healthy $NODE" || exit 1
