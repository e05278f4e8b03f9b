// SPDX-License-Identifier: Apache-2.0

package kernel

import "testing"

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
