#!/bin/bash
# The guest's part of make test-vm, as root of a VM that has this machine's files for its own:
# a soft-RoCE device, huge pages, then the tests. guest.sh CHECKOUT RESULTS
set -u
export LC_ALL=C.UTF-8 HOME=/root
checkout=$1 results=$2

die() {
	echo "guest: $*"
	exit 125
}

if [ -z "${INSIDE-}" ]; then
	modprobe -a dummy ib_uverbs rdma_rxe rdma_ucm || die "no modules for $(uname -r)"
	ip link add rxenet type dummy && ip addr add 10.77.0.1/24 dev rxenet &&
		ip link set rxenet up && rdma link add rxe0 type rxe netdev rxenet || die 'no rxe0'
	echo 96 >/proc/sys/vm/nr_hugepages
	ulimit -l unlimited
	# The same files once more, cached, which makes an interpreter start four times as fast,
	# and with a layer above them that takes what is written.
	root=/run/root
	mkdir -p $root/{files,layer,new}
	mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose files $root/files &&
		mount -t tmpfs -o size=75% layer $root/layer && mkdir $root/layer/{upper,work} &&
		mount -t overlay -o "lowerdir=$root/files,upperdir=$root/layer/upper,workdir=$root/layer/work" \
			overlay $root/new || die 'no cached root'
	for folder in proc sys dev run; do
		mount --rbind /$folder $root/new/$folder
	done
	mount --bind "$results" "$root/new$results"
	INSIDE=1 exec chroot $root/new /bin/bash "$checkout/tests/vm/guest.sh" "$checkout" "$results"
fi

cd "$checkout" || die "no $checkout"
export PATH=$checkout/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export RDMAFORK_TEST_GUEST=1
export RDMAFORK_TEST_DEVICE=required RDMAFORK_TEST_SLOWNESS=20 RDMAFORK_TEST_OPS=1500 TMPDIR=/tmp
unset INSIDE
failed=0

# tests NAME ARGUMENTS...: pytest, its JUnit file in the results
tests() {
	local name=$1 status
	shift
	echo "== $name"
	COLUMNS=100 .venv/bin/python -m pytest --color=no -o timeout=900 \
		--junit-xml="$results/$name.xml" "$@" </dev/null
	status=$?
	[ $status = 0 ] || failed=1
	echo "$status" >"$results/$name.status"
}

programs() {
	local program name status chosen
	echo '== c'
	mkdir -p "$results/c"
	for program in tests/engine/test_*.c; do
		name=$(basename "$program" .c)
		chosen=()
		# The others go through the engine instruction by instruction, for ten minutes and
		# more here: what they ask is the same under every kernel.
		[ "$name" = test_steps ] && chosen=(children_always_have_shared_memory)
		timeout 600 "build/ctest/debug/$name" "${chosen[@]}" >"$results/c/$name.log" 2>&1 </dev/null
		status=$?
		echo "exit status $status" >>"$results/c/$name.log"
		[ $status = 0 ] && echo "ok $name" && continue
		echo "FAILED $name ($status)"
		cat "$results/c/$name.log"
		failed=1
	done
}

echo "== $(uname -r), $(rdma system), $(ibv_devices | tail -n 1 | awk '{ print $1 }')"
if [ -s "$results/arguments" ]; then
	eval "tests chosen $(cat "$results/arguments")"
else
	tests device tests/vm
	tests engine @tests/vm/engine.txt
	programs
fi
# Without this file the guest did not come to its end.
echo $failed >"$results/end"
exit $failed
