# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Steps of .ci/run and release/release, in the root of the checkout.

sudo=()
[ "$(id -u)" = 0 ] || sudo=(sudo)
w=$(mktemp -d "${TMPDIR:-/tmp}/weir-ci.XXXXXX")
trap 'rm -rf "$w"' EXIT
passed=0
failed=()
times=()

# step NAME COMMAND... runs a step and records its result.
step() {
	local name=$1 start=$SECONDS verdict=ok
	shift
	echo
	echo "=== $name: $*"
	if "$@"; then
		passed=$((passed + 1))
	else
		verdict=FAIL
		failed+=("$name")
	fi
	times+=("$(printf '%-22s %-4s %5d s' "$name" "$verdict" $((SECONDS - start)))")
	echo "--- $name: $verdict ($((SECONDS - start)) s)"
	[ "$verdict" = ok ]
}

# verdict prints the times of all steps. It fails if a step failed.
verdict() {
	echo
	printf '%s\n' "${times[@]}"
	printf '%-22s %-4s %5d s\n' 'all steps' '' "$SECONDS"
	echo "$passed passed, ${#failed[@]} failed"
	[ ${#failed[@]} = 0 ] || { echo "FAIL: ${failed[*]}"; return 1; }
}

# summary prints the verdict and ends the script.
summary() {
	verdict
	exit
}

# bootstrap runs a target like a user with a fresh clone of the project.
bootstrap() {
	"${sudo[@]}" ./bootstrap "$@"
}

# The README's test command with -short. This omits no test but reduces
# repetitions, so a third of the time is left for the kernel matrix. testlog
# prints the output of go test, and fails on a skip for lack of root or a tool.
tests() {
	bootstrap test TESTFLAGS='-json -short' 2>&1 | bin/testlog -allow kernel,systemd
}

# experiment NAME checks its correctness claims with real peers. bootstrap has
# installed these, so a skipped one is a failure here. (Each takes less than a
# minute on an idle host. A shared one took six times as long.)
experiment() {
	local status=0
	"${sudo[@]}" timeout -k 10 300 bin/weir-lab run "$1" --smoke --json >"$w/result" || status=$?
	cat "$w/result"
	if grep -q '"skipped"' "$w/result"; then
		echo "$1 skipped a peer"
		status=1
	fi
	return "$status"
}

list_experiments() {
	bin/weir-lab list --names >"$w/names" && [ -s "$w/names" ]
}

# demonstration NAME runs it in its shortest form. Each takes at most 30 s on an
# idle host.
demonstration() {
	"${sudo[@]}" timeout -k 10 300 bin/weir-lab demo "$1" --smoke
}

list_demonstrations() {
	bin/weir-lab demo --names >"$w/demos" && [ -s "$w/demos" ]
}

# experiments and demonstrations run each one as a step.
experiments() {
	local name
	step experiments list_experiments
	while read -r name; do
		step "lab $name" experiment "$name" </dev/null
	done <"$w/names"
}

demonstrations() {
	local name
	step demonstrations list_demonstrations
	while read -r name; do
		step "demo $name" demonstration "$name" </dev/null
	done <"$w/demos"
}
