#!/bin/sh
# UCX as it is, protected: its own benchmark between two processes of this machine, both under
# `rdmafork exec`, and what rdmafork saw at the end of each, on stderr.
#
#     examples/ucx_exec.sh mlx5_0 [PORT]
#
# Needs ucx_perftest (Debian: ucx-utils). For a program of your own, the last two lines are all there
# is: put `rdmafork exec --report r.json --` before it, and under a launcher, before each rank.
set -eu
device=${1:?the name of a device: rdmafork devices lists them}
port=${2:-13337}
export UCX_TLS=rc,self

rdmafork exec --report - -- ucx_perftest -p "$port" &
server=$!
trap 'kill $server 2>/dev/null || :' EXIT
sleep 1
rdmafork exec --report - -- ucx_perftest 127.0.0.1 -p "$port" -d "$device:1" \
	-x rc_verbs -t put_bw -D zcopy -s 65536 -n 50 -w 5
wait $server
