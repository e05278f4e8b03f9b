// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"strings"
	"testing"
)

// TestFindTellsWhatIsGone checks that the error for root does not advise to run as root. A
// namespace that root cannot find is gone.
func TestFindTellsWhatIsGone(t *testing.T) {
	id := ID{Inode: 1} // of no namespace
	for ref, name := range map[string]string{"": ": net:[1]: ", "net:[1]": ": net:[1]: ", "absent": ": absent (net:[1]): "} {
		ns, err := Find(ref, id)
		if !errors.Is(err, ErrGone) || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: %v, %v", ref, ns, err)
		}
	}
	if got := whyGone(true); strings.Contains(got, "run as root") || !strings.HasSuffix(got, ": create it again or remove it from the file, then run weir apply") {
		t.Errorf("root gets %q", got)
	}
	if got := whyGone(false); !strings.Contains(got, "run as root") {
		t.Errorf("another user gets %q", got)
	}
}
