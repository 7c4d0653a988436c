#!/bin/sh
# run.sh VARIANT PROGRAM: its output lies beside it, and is shown where it fails.
if timeout 600 "$2" >"$2.log" 2>&1; then
	echo "ok      $1	${2##*/}"
else
	echo "FAILED  $1	${2##*/} ($?)" | cat - "$2.log"
	exit 1
fi
