// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

func TestNetfilterDispatcher(t *testing.T) {
	needs(t, NetfilterLink)
	p := pipe{nstest.NewWire(t), t}
	slot, err := NewDispatcherSlot("test_slot")
	if err != nil {
		t.Fatal(err)
	}
	defer slot.Close()
	d := Dispatcher{slot}
	run, err := d.Load("test_dispatch")
	if err != nil {
		t.Fatal(err)
	}
	defer run.Close()
	places := map[uint8]Netfilter{unix.NFPROTO_IPV4: {unix.NFPROTO_IPV4, Input, -150}, unix.NFPROTO_IPV6: {unix.NFPROTO_IPV6, Input, -150}}
	links := map[uint8]Link{}
	for f, a := range places {
		within(t, p.B, func() (err error) { links[f], err = a.Attach(run); return err })
		defer links[f].Close()
		if err := a.Verify(links[f]); err != nil {
			t.Error(err)
		}
		other := a
		other.Priority++
		if err := other.Verify(links[f]); !errors.Is(err, ErrDetached) {
			t.Errorf("verified at another priority: %v", err)
		}
	}
	p.want("46", "an empty slot passes")
	drop := returns(t, ebpf.Netfilter, 0)
	if err := d.Set(drop); err != nil {
		t.Fatal(err)
	}
	p.want("", "dropping")
	info, _ := drop.Info()
	want, _ := info.ID()
	if id, err := d.Program(); err != nil || id != uint32(want) {
		t.Errorf("runs program %d, %v; want %d", id, err, want)
	}
	if err := d.Set(returns(t, ebpf.Netfilter, nfAccept)); err != nil {
		t.Fatal(err)
	}
	p.want("46", "passing")
	if err := d.Set(drop); err != nil {
		t.Fatal(err)
	}
	links[unix.NFPROTO_IPV4].Close()
	p.want("4", "the link of IPv4 ended")
	err = p.B.Do(func() error { _, err := places[unix.NFPROTO_IPV6].Attach(run); return err })
	if !errors.Is(err, ErrOccupied) || !strings.Contains(err.Error(), "priority") {
		t.Errorf("a second program of that priority: %v", err)
	}
}

// Netfilter programs are told apart by their namespaces, although their links do not report them.
func TestNetfilterHere(t *testing.T) {
	needs(t, NetfilterLink)
	p := pipe{nstest.NewWire(t), t}
	at := Netfilter{unix.NFPROTO_IPV6, Forward, 4711}
	seen := func(ns *netns.Handle) (here bool) {
		t.Helper()
		within(t, ns, func() error {
			all, err := new(NetfilterSeen).Here(unix.NFPROTO_IPV6)
			here = slices.Contains(all, at)
			return err
		})
		return here
	}
	var ln Link
	within(t, p.B, func() (err error) { ln, err = at.Attach(returns(t, ebpf.Netfilter, nfAccept)); return err })
	if seen(p.A) || !seen(p.B) {
		t.Errorf("a program in B: seen in A %v, in B %v", seen(p.A), seen(p.B))
	}
	ln.Close()
	// Probing leaves nothing behind.
	within(t, p.A, func() error {
		ln, err := at.Attach(returns(t, ebpf.Netfilter, nfAccept))
		if err == nil {
			ln.Close()
		}
		return err
	})
	if seen(p.B) {
		t.Error("seen after its end")
	}
}
