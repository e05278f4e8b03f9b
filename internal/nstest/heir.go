// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"testing"
	"time"

	"github.com/weir-project/weir/internal/netns"
)

// Successor makes a namespace of a name that has the inode number of a deleted one. It is nil if the number does not come back
// within 5 s: something else of this host may have got it.
func Successor(t testing.TB, name string, inode uint64) *netns.Handle {
	t.Helper()
	var others []*netns.Handle // the kernel gives the lowest number that is free
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
				_ = netns.Delete(name) // the test may have done so
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
