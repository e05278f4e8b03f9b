// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
)

// TestAgentLearnsFromWhoAsks checks that a host asking to move an unknown connection acquires it,
// if its service goes by flow. No host acquires another's connection.
func TestAgentLearnsFromWhoAsks(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	for id, s := range []Service{{Proto: unix.IPPROTO_TCP, BySource: true}, {Proto: unix.IPPROTO_UDP}} {
		s.ID, s.Listen = 2+id, netip.MustParseAddrPort("10.55.0.2:9000")
		if err := f.SetService(s); err != nil {
			t.Fatal(err)
		}
	}
	s := newAgents(t, f, time.Second)
	client := netip.MustParseAddrPort("10.1.0.2:5555")
	ask := move.Message{Kind: move.Ask, From: move.AtSource, To: move.AtLoadBalancer}
	asks := func(host move.Backend, service int) bool {
		t.Helper()
		s.says(host, Key{Client: client, Service: service}, ask)
		m := s.hears(host)
		if m.Kind != move.Known {
			t.Fatal(m)
		}
		return m.OK
	}
	if !asks(2, 0) {
		t.Error("who asks does not have it")
	}
	if asks(1, 0) {
		t.Error("another has it as well")
	}
	if fl, err := f.Flow(Key{Client: client, Service: 0}); err != nil || fl.Owner != 2 || fl.Epoch != 0 || fl.To != 0 || fl.Nonce == 0 {
		t.Errorf("%+v, %v", fl, err)
	}
	for _, service := range []int{2, 3, 9} {
		if asks(1, service) {
			t.Errorf("a flow of service %d is learned", service)
		}
	}
	hosts := []Backend(nil)
	for _, h := range f.backends {
		h.Services = []int{1}
		hosts = append(hosts, h)
	}
	do(t, sc.middle, func() error { return f.SetBackends(hosts) })
	other := Key{Client: netip.MustParseAddrPort("10.1.0.2:6666")}
	s.says(1, other, ask)
	if m := s.hears(1); m.OK {
		t.Error("a host that is none of the service's has it")
	}
	if _, err := f.Flow(other); !errors.Is(err, errNoFlow) {
		t.Error(err)
	}
}
