// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// TestLongPath checks the error for too long a socket path, of the keeper and of a member. It contains the limit.
func TestLongPath(t *testing.T) {
	for _, path := range []string{"/tmp/" + strings.Repeat("x", 200), "@" + strings.Repeat("x", 200)} {
		l, err := Listen(path)
		if err == nil {
			l.Close()
		}
		c, derr := wire.Dial(t.Context(), path)
		if derr == nil {
			c.Close()
		}
		for _, err := range []error{err, derr} {
			if err == nil || !strings.Contains(err.Error(), "choose a shorter one") {
				t.Errorf("%.20s: %v", path, err)
			}
		}
	}
}
