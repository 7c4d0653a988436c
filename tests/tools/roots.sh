#!/bin/bash
# The sdist and the wheel, in Debian roots of their own, without a network: make test-pythons,
# test-bare, test-debian.
#
#     roots.sh pythons    the sdist with each Python of sid, 3.13 and later: built, tested, type-checked
#     roots.sh bare       the wheel beside nothing but the Python it is for
#     roots.sh debian     packages of sid from the sdist and packaging/debian: the same built twice,
#                         looked at by lintian, installed, tested
#
# The roots stay in build/roots until other packages are asked for; to have newer ones, remove them.
set -euo pipefail
cd "$(dirname "$0")/../.."
roots=$PWD/build/roots
pip=(.venv/bin/python -m pip -q --disable-pip-version-check)
failed=()

[ "$(id -u)" = 0 ] || { echo 'roots.sh: only root can make roots' >&2; exit 1; }
command -v debootstrap >/dev/null || apt-get -qq install --no-install-recommends debootstrap >/dev/null

# root NAME SUITE PACKAGES
root() {
	[ "$(cat "$roots/$1/.packages" 2>/dev/null)" = "$3" ] && return
	echo "== debootstrap $2"
	rm -rf "${roots:?}/$1"
	mkdir -p "$roots"
	debootstrap --variant=minbase --include="$3" "$2" "$roots/$1" >"$roots/$1.log" 2>&1 ||
		{ tail -n 20 "$roots/$1.log"; exit 1; }
	echo "$3" >"$roots/$1/.packages"
}

# inside NAME COMMAND...: no network; processes and terminals of its own; /sys, for huge pages
inside() {
	unshare --net --mount --pid --fork --kill-child --mount-proc="$roots/$1/proc" \
		sh -ec 'mount --rbind /sys "$0/sys"; mount -t devpts -o ptmxmode=666 devpts "$0/dev/pts"
			exec env -i "$@"' "$roots/$1" \
		PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
		RDMAFORK_TEST_SLOWNESS="${RDMAFORK_TEST_SLOWNESS:-1}" chroot "$roots/$1" "${@:2}"
}

# A script is known by its first line.
step() {
	local what=${*%%$'\n'*}
	echo "== $what"
	inside "$@" || failed+=("$what")
}

pythons() {
	local python version place=$roots/sid/rdmafork
	root sid sid "$(echo gcc libc6-dev make strace libibverbs1 ibverbs-providers procps \
		python3.1{3,4,5}-{dev,venv} | tr ' ' ,)"
	rm -rf "$place"
	mkdir -p "$place/wheels"
	tar -xzf dist/*.tar.gz -C "$place" --strip-components=1
	mkdir "$place/dist" && cp dist/*.tar.gz "$place/dist"
	rm -r "$place/rdmafork" "$place/csrc"
	for python in "$roots"/sid/usr/bin/python3.??; do
		version=${python##*python}
		"${pip[@]}" download -d "$place/wheels" --only-binary=:all: --python-version "$version" \
			--platform "manylinux_2_28_$(uname -m)" --platform "manylinux_2_27_$(uname -m)" \
			--platform "manylinux2014_$(uname -m)" --platform "manylinux_2_17_$(uname -m)" \
			Cython hypothesis mypy numpy pytest pytest-timeout setuptools setuptools-scm
		step sid bash -ec "# Python $version
			cd /rdmafork
			python$version -m venv --clear venv$version
			export PATH=/rdmafork/venv$version/bin:\$PATH
			python -m pip install -q --no-index --find-links wheels Cython hypothesis mypy numpy \
				pytest pytest-timeout setuptools setuptools-scm
			python -m pip install -q --no-index --no-build-isolation --no-deps dist/*.tar.gz
			python -c 'import rdmafork, sys; print(sys.version, rdmafork.__version__)'
			python -m pytest -q -p no:cacheprovider tests/surface/test_{buffer,buffers,child,cost,errors}.py \
				tests/surface/test_{modes,on_fork,protection,threads}.py tests/package/test_examples.py
			python -m mypy --strict --python-version $version -p rdmafork --exclude benchmarks
		"
	done
}

# Debian's release with the Python that the wheel is for.
bare() {
	local wheel suite
	wheel=$(echo dist/*.whl)
	case $wheel in
	*-cp311-*) suite=bookworm ;;
	*-cp313-*) suite=trixie ;;
	*) echo "no release of Debian has the Python of $wheel" >&2; exit 1 ;;
	esac
	root "bare-$suite" "$suite" python3
	rm -rf "$roots/bare-$suite/opt/rdmafork"
	.venv/bin/python -m zipfile -e "$wheel" "$roots/bare-$suite/opt/rdmafork"
	step "bare-$suite" env PYTHONPATH=/opt/rdmafork python3 -W error -c '
import os, rdmafork
rdmafork.fork_init()
with rdmafork.register(bytearray(1 << 20)) as region:
    assert os.waitpid(os.fork() or os._exit(0), 0)[1] == 0
    print(rdmafork.__version__, *rdmafork.protected_ranges())'
	step "bare-$suite" env PYTHONPATH=/opt/rdmafork python3 -m rdmafork demo
	step "bare-$suite" env PYTHONPATH=/opt/rdmafork sh -c 'python3 -m rdmafork doctor; [ $? -le 1 ]'
}

debian() {
	local version place=$roots/debian/rdmafork
	root debian sid "$(echo build-essential cython3 debhelper dh-python fakeroot help2man libibverbs1 \
		lintian perl-openssl-defaults pkgconf procps pybuild-plugin-pyproject strace \
		python3-{all-dev,hypothesis,numpy,pip,pytest,pytest-timeout,setuptools,setuptools-scm} |
		tr ' ' ,)"
	version=$(basename dist/*.tar.gz .tar.gz)
	version=${version#rdmafork-}
	version=${version%%.dev*} # pybuild takes no other
	rm -rf "$place"
	mkdir -p "$place/source" "$place/tested"
	tar -xzf dist/*.tar.gz -C "$place/source" --strip-components=1
	cp -r packaging/debian "$place/source"
	printf '%s\n' "rdmafork ($version-1) unstable; urgency=medium" '' \
		'  * Built by make test-debian.' '' \
		" -- rdmafork contributors <rdmafork@example.org>  $(date -R)" >"$place/source/debian/changelog"
	step debian bash -ec '# dpkg-buildpackage, twice
		cd /rdmafork/source
		for build in first second; do
			dpkg-buildpackage -us -uc -b >../$build.log 2>&1 || { tail -n 60 ../$build.log; exit 1; }
			export DEB_BUILD_OPTIONS=nocheck
			mkdir ../$build && mv ../*.deb ../$build
		done
		cd .. && diff -r first second && ls -sh first'
	step debian bash -ec '# lintian
		lintian --allow-root --suppress-tags initial-upload-closes-no-bugs \
			--fail-on error,warning /rdmafork/first/*.deb'
	step debian bash -ec '# the installed packages
		dpkg -i /rdmafork/first/{librdmafork-dev,python3-rdmafork}_*.deb >/dev/null
		cd /rdmafork/tested && cp -r ../source/{pyproject.toml,examples,tests} .
		python3 -W error -c "import rdmafork; print(rdmafork.__file__, rdmafork.__version__)"
		python3 -m pytest -q -p no:cacheprovider tests/surface/test_{buffer,child,modes,on_fork}.py \
			tests/package/test_c_api.py
		cc examples/c_program/survives.c $(pkg-config --cflags --libs rdmafork) -o survives && ./survives
		rdmafork demo >/dev/null'
}

"$1"
if [ ${#failed[@]} -gt 0 ]; then
	printf 'FAILED: %s\n' "${failed[@]}"
	exit 1
fi
