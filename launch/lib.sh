#!/usr/bin/env bash
# What the phase files do inside a job. Sourced by them from the repository's root, where jobs are submitted.
#
#   launch_phase experiment=NAME [override …]    train until the run is done, or hand the job back to Slurm
#   bash lib.sh run                              the same, from the frozen code
#   bash lib.sh rank RUN ATTEMPT                 one process of an attempt, started by srun
#
# What follows an attempt is decided by launch/attempts.py; this file starts, waits, passes signals on and obeys.
set -uo pipefail

SITE=${LANEFORMER_SITE:-launch/site.env}
# shellcheck disable=SC1090
if [ -f "$SITE" ]; then set -a && source "$SITE" && set +a; fi
PYTHON=${PYTHON:-$PWD/.venv/bin/python}

say() { echo "$(date +%T) launch: $*" >&2; }
give_in() { # EXIT-CODE MESSAGE
    say "$2"
    exit "$1"
}

# COMMAND…: again after some seconds where it fails; Slurm's controller is sometimes away for a minute
patiently() {
    local delay
    for delay in ${PATIENCE:-2 5 15 30 60}; do
        "$@" && return
        say "'$*' failed; again in $delay s"
        sleep "$delay"
    done
    "$@"
}

# Python from the code frozen in the run directory, with the repository's root as working directory: relative
# paths of the configuration (runs, data) mean what they meant when it was composed.
frozen() { PYTHONSAFEPATH=1 PYTHONPATH=$CODE "$PYTHON" "$@"; }

launch_phase() {
    [ -f launch/lib.sh ] || give_in 2 "submit from the repository's root, not from $PWD"
    # The run's path is the job's comment: it survives a requeue and shows in squeue.
    RUN=$(patiently squeue --noheader --jobs="$SLURM_JOB_ID" --format=%k)
    if [ ! -f "$RUN/resolved.yaml" ]; then # submitted by hand
        RUN=$("$PYTHON" -m launch prepare "$@") || exit 2
        patiently scontrol update JobId="$SLURM_JOB_ID" Comment="$RUN" || exit 1
    fi
    CODE=$RUN/code/tree
    [ -f "$CODE/launch/lib.sh" ] || give_in 2 "$CODE is missing: submit the run again"
    mkdir -p "$RUN/logs" && exec >>"$RUN/logs/slurm-$SLURM_JOB_ID.log" 2>&1
    export RUN CODE PYTHON LANEFORMER_SITE=$SITE
    exec bash "$CODE/launch/lib.sh" run
}

run() {
    local facts attempt nodes ranks status problem action code
    SIGNAL="" INTERRUPTED=0
    trap 'on_signal USR1' USR1
    trap 'on_signal TERM' TERM
    environment
    while :; do
        check_nodes
        facts=$(frozen -m launch begin run="$RUN") || exit $?
        [ "$facts" = done ] && exit 0
        read -r attempt nodes ranks <<<"$facts"
        [ -z "$SIGNAL" ] || : >"$RUN/control/stop" # asked before the attempt began; begin clears old requests
        status=0
        problem=$(frozen -m train resolved="$RUN/resolved.yaml" attempt="$attempt" --check 2>&1 >/dev/null) || status=$?
        if [ "$status" = 0 ]; then
            problem=""
            attempt_ranks "$attempt" "$nodes" "$ranks"
            status=$?
        fi
        facts=$(frozen -m launch end run="$RUN" attempt="$attempt" status="$status" \
            signal="$SIGNAL" problem="$problem") || give_in 1 "launch end failed"
        read -r action code <<<"$facts"
        case $action in
        finish | leave) exit 0 ;;
        again) continue ;;
        requeue) hand_back requeue ;;
        hold) hand_back requeuehold ;;
        give-up) exit "$code" ;;
        *) give_in 1 "launch end said '$facts'" ;;
        esac
    done
}

# Every node's health, before each attempt. A node that fails is named, and the job continues as a successor
# without it: a requeued job cannot exclude nodes.
check_nodes() {
    local report=$RUN/logs/health-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.txt nodes bad node
    nodes=$(patiently scontrol show node "$SLURM_JOB_NODELIST" -o | # name=address of each, for all-reduces in pairs
        sed -n 's/^NodeName=\([^ ]*\) .* NodeAddr=\([^ ]*\) .*/\1=\2/p')
    : >"$report"
    HEALTH_NODES=$(paste -sd' ' <<<"$nodes") srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --ntasks="$SLURM_JOB_NUM_NODES" --wait=600 --output="$report" --open-mode=append \
        bash "$CODE/launch/health.sh"
    local status=$?
    grep -E '^(unhealthy|weak link)' "$report" | sort -u >&2
    [ "$status" != 0 ] || return 0
    [ -z "$SIGNAL" ] || return 0 # being ended: the check was cut off
    bad=$(sed -n 's/^unhealthy \([^ ]*\) .*/\1/p' "$report" | sort -u | paste -sd,)
    if [ -z "$bad" ]; then # then it is those that gave no answer
        for node in $(sed 's/=.*//' <<<"$nodes"); do
            grep -qx "healthy $node" "$report" || bad=${bad:+$bad,}$node
        done
        [ -z "$bad" ] || say "no answer from $bad"
    fi
    [ -n "$bad" ] || give_in 1 "the health check failed and named no node: $report"
    frozen -m launch successor run="$RUN" nodes="$bad" && exit 0
    give_in 1 "no successor without $bad could be submitted"
}

# USR1 comes before the time limit and before a preemption; TERM when Slurm ends the job. Both ask the ranks to
# save and stop; only after USR1 is it for us to requeue. The file is obeyed at the next step by all ranks at
# once, which a signal to the step would not be.
on_signal() {
    say "SIG$1: asking the run to save and stop"
    SIGNAL=$1 INTERRUPTED=1
    mkdir -p "$RUN/control" && : >"$RUN/control/stop"
}

attempt_ranks() { # ATTEMPT NODES RANKS-A-NODE: start the ranks, wait for them, return their exit status
    local step status logs=$RUN/logs/$1
    mkdir -p "$logs"
    export MASTER_ADDR MASTER_PORT
    MASTER_ADDR=$(scontrol show node "$SLURMD_NODENAME" -o | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')
    MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + $1) % 10000))
    srun --nodes="$2" --ntasks=$(($2 * $3)) --ntasks-per-node="$3" --distribution=block \
        --kill-on-bad-exit=1 --wait=60 --output="$logs/output-%t.log" \
        bash "$CODE/launch/lib.sh" rank "$RUN" "$1" &
    step=$!
    while :; do # wait returns early when a trap ran
        INTERRUPTED=0
        wait "$step"
        status=$?
        [ "$INTERRUPTED" = 1 ] || break
    done
    return "$status"
}

rank() { # RUN ATTEMPT
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export PYTHONSAFEPATH=1 PYTHONPATH=$CODE
    trap '' TERM # the batch script asks for the save; until it is done, or the kill comes, go on
    exec "$PYTHON" -m train resolved="$1/resolved.yaml" attempt="$2"
}

launch_eval() { # run=RUN [key=value …]: score the checkpoints of a run as they appear
    local word
    RUN=""
    for word in "$@"; do [[ $word != run=* ]] || RUN=${word#run=}; done
    [ -d "$RUN" ] || give_in 2 "give run= a run directory, not '$RUN'"
    CODE=$RUN/code/tree
    [ -d "$CODE" ] || CODE=$PWD # a run that was not submitted
    resumable frozen -m eval score --follow "$@"
}

launch_prepare() { # tasks=N key=value … in an array job: this task's share of a source; merge key=value …: all shares
    local word tasks="" words=()
    CODE=$PWD
    if [ "${1:-}" = merge ]; then
        resumable frozen -m data_mixtures "$@"
    fi
    for word in "$@"; do
        if [[ $word == tasks=* ]]; then tasks=${word#tasks=}; else words+=("$word"); fi
    done
    [ -n "$tasks" ] && [ -n "${SLURM_ARRAY_TASK_ID:-}" ] ||
        give_in 2 "submit with --array=0-<N-1> and tasks=N, or with 'merge' as the first word"
    resumable frozen -m data_mixtures prepare "workers=${SLURM_CPUS_PER_TASK:-1}" "${words[@]}" \
        "shard=$SLURM_ARRAY_TASK_ID/$tasks"
}

resumable() { # COMMAND…, which goes on where it was killed: before the time limit it is, and the job is requeued
    environment
    INTERRUPTED=0
    trap 'INTERRUPTED=1; kill "$!"' USR1
    "$@" &
    wait "$!"
    local status=$?
    [ "$INTERRUPTED" = 0 ] || hand_back requeue
    exit "$status"
}

hand_back() { # requeue | requeuehold: Slurm ends this script while it waits
    trap '' TERM USR1
    patiently scontrol "$1" "$SLURM_JOB_ID" || give_in 1 "scontrol $1 failed"
    sleep 120
    exit 0
}

environment() { # what holds on every cluster; the rest belongs into site.env
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not inherit it since Slurm 22.05
    export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN} PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    ulimit -n 65536 2>/dev/null || true
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then "$@"; fi
