// SPDX-License-Identifier: Apache-2.0

package nstest

import "os"

// Stride is from how many steps a test takes one that kills something at each step of what it does: as many as usual
// says, or every one where WEIR_EVERY_STEP is set (make test-every-step). A test that leaves steps out begins at
// another one in each run, so that none is left out for good.
func Stride(usual int) int {
	if os.Getenv("WEIR_EVERY_STEP") != "" {
		return 1
	}
	return usual
}
