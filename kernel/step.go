// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"testing"

	"golang.org/x/sys/unix"
)

// stepHook is called between the steps of every change of state.
var stepHook func(step string)

// OnStep lets a test stop or kill the process at a named step of publish,
// removal or of a feature's own change, to see that the next command mends it.
// Outside tests it panics.
func OnStep(hook func(step string)) {
	if !testing.Testing() {
		panic("kernel.OnStep is for tests")
	}
	stepHook = hook
}

// Step marks a point at which a crash must be harmless.
func Step(name string) {
	if stepHook != nil {
		stepHook(name)
	}
}

// failHook fails the change at a step, if it returns an error.
var failHook func(step string) error

// OnTry lets a test fail a change at a named step, to see that it leaves what was there. Outside tests it panics.
func OnTry(hook func(step string) error) {
	if !testing.Testing() {
		panic("kernel.OnTry is for tests")
	}
	failHook = hook
}

// Try marks a point at which a crash and a failure must be harmless.
func Try(name string) error {
	Step(name)
	if failHook != nil {
		return failHook(name)
	}
	return nil
}

// WithoutExchange lets a test see what becomes of replacements where bpffs cannot
// exchange two directories (before Linux 5.16). Outside tests it panics.
func WithoutExchange() {
	if !testing.Testing() {
		panic("kernel.WithoutExchange is for tests")
	}
	exchange = func(_, _ string) error { return unix.EINVAL }
}
