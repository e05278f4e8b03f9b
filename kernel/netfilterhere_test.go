// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
)

// Hook points are sorted, and occupied hooks are probed again only if the host's links have changed.
func TestNetfilterSeen(t *testing.T) {
	needs(t, NetfilterLink)
	w := nstest.NewWire(t)
	tried, real := 0, netfilterOccupied
	t.Cleanup(func() { netfilterOccupied = real })
	netfilterOccupied = func(places []Netfilter) ([]Netfilter, error) { tried++; return real(places) }
	var seen NetfilterSeen
	// Only priorities of this test: foreign programs may change.
	look := func() (here []Netfilter) {
		t.Helper()
		within(t, w.B, func() (err error) {
			here, err = seen.Here(unix.NFPROTO_IPV6)
			return err
		})
		return slices.DeleteFunc(slices.Clone(here), func(a Netfilter) bool { return a.Priority < 4700 || a.Priority > 4799 })
	}
	if got := look(); len(got) != 0 {
		t.Errorf("before: %v", got)
	}
	pass := returns(t, ebpf.Netfilter, nfAccept)
	want := []Netfilter{{unix.NFPROTO_IPV6, Prerouting, 4703}, {unix.NFPROTO_IPV6, Forward, 4701}, {unix.NFPROTO_IPV6, Forward, 4702}, {unix.NFPROTO_IPV6, Postrouting, 4700}}
	links := map[int]Link{}
	for _, i := range []int{2, 0, 3, 1} {
		within(t, w.B, func() (err error) { links[i], err = want[i].Attach(pass); return err })
		t.Cleanup(func() { links[i].Close() })
	}
	fewer := want[1:]
	for range 20 {
		if got := look(); !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	if tried > 5 { // concurrent changes on the host count too
		t.Errorf("tried %d times in 21 looks", tried)
	}
	links[0].Close()
	nstest.Eventually(t, func() error {
		if !slices.Equal(look(), fewer) {
			return fmt.Errorf("%v, want %v", look(), fewer)
		}
		return nil
	})
	before := tried
	seen.since = seen.since.Add(-netfilterFor)
	if look(); tried == before {
		t.Error("what was found long ago is not tried anew")
	}
}
