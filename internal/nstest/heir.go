// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"testing"
	"time"

	"github.com/weir-project/weir/internal/netns"
)

// Successor creates a named namespace with the inode number of a deleted one. It returns nil if the
// number does not come back within 5 s, because another program on this host may have it.
func Successor(t testing.TB, name string, inode uint64) *netns.Handle {
	t.Helper()
	var others []*netns.Handle // the kernel assigns the lowest free number
	defer func() {
		for _, o := range others {
			o.Close()
		}
	}()
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && len(others) < 500; {
		ns, err := netns.Create(name)
		if err != nil {
			t.Fatalf("nstest: %v", err)
		}
		if ns.Inode() == inode {
			t.Cleanup(func() {
				ns.Close()
				_ = netns.Delete(name) // the test may have deleted it
			})
			return ns
		}
		others = append(others, ns)
		if err := netns.Delete(name); err != nil {
			t.Fatalf("nstest: %v", err)
		}
	}
	return nil
}
