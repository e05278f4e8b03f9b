// SPDX-License-Identifier: Apache-2.0

package kernel

import "github.com/weir-project/weir/kernel/internal/step"

// Step marks a point where a crash must be harmless. Tests stop or kill the process there with kerneltest.OnStep.
func Step(name string) {
	if step.Hook != nil {
		step.Hook(name)
	}
}

// Try marks a point where a crash and a failure must be harmless. Tests fail the change there with kerneltest.OnTry.
func Try(name string) error {
	Step(name)
	if step.Fail != nil {
		return step.Fail(name)
	}
	return nil
}
