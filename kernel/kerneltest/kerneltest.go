// SPDX-License-Identifier: Apache-2.0

// Package kerneltest stops, kills and fails changes of package kernel at their steps. Its functions panic outside tests.
package kerneltest

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel/internal/step"
)

// OnStep calls hook at each named step of a publication, a removal or a feature's own change; nil stops that. A hook may
// kill the process to test recovery by the next command.
func OnStep(hook func(step string)) {
	inTest("OnStep")
	step.Hook = hook
}

// OnTry calls hook at each step and fails the change with its error; nil stops that.
func OnTry(hook func(step string) error) {
	inTest("OnTry")
	step.Fail = hook
}

// WithoutExchange makes replacements use two renames, like a bpffs before Linux 5.16, which cannot exchange directories.
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

// Release returns the running kernel's version from uname. Only tests compare versions: other code probes facilities.
func Release() (v [2]int, err error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return v, err
	}
	_, err = fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &v[0], &v[1])
	return v, err
}
