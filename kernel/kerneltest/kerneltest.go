// SPDX-License-Identifier: Apache-2.0

// Package kerneltest stops, kills and fails changes of package kernel at their steps. Its
// functions panic outside tests.
package kerneltest

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel/internal/step"
)

// OnStep calls hook at each named step of publish, of removal and of a feature's own
// change; nil ends that. A hook may kill the process, to see the next command recover.
func OnStep(hook func(step string)) {
	inTest("OnStep")
	step.Hook = hook
}

// OnTry fails a change at each step for which hook returns an error; nil ends that.
func OnTry(hook func(step string) error) {
	inTest("OnTry")
	step.Fail = hook
}

// WithoutExchange makes replacements work in two renames, as on a bpffs that cannot
// exchange two directories (before Linux 5.16).
func WithoutExchange() {
	inTest("WithoutExchange")
	step.Exchange = func(_, _ string) error { return unix.EINVAL }
}

// WithExchange ends WithoutExchange.
func WithExchange() {
	inTest("WithExchange")
	step.Exchange = nil
}

func inTest(name string) {
	if !testing.Testing() {
		panic("kerneltest." + name + " is for tests")
	}
}

// Release is the running kernel's, as uname has it. Only tests compare
// it: what a kernel can do is probed.
func Release() (v [2]int, err error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return v, err
	}
	_, err = fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &v[0], &v[1])
	return v, err
}
