// SPDX-License-Identifier: Apache-2.0

package nstest

import "os"

// Stride returns the step width for tests that kill something at each step of an operation. It is
// usual, or 1 if WEIR_EVERY_STEP is set (make test-every-step). A test with a larger width starts
// at another step in each run, so no step is left out for good.
func Stride(usual int) int {
	if os.Getenv("WEIR_EVERY_STEP") != "" {
		return 1
	}
	return usual
}
