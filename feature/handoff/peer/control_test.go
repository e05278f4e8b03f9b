// SPDX-License-Identifier: Apache-2.0

package peer_test

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
)

// TestControl checks that Receive passes frames other than moves to their handlers, in order, and
// answers pings.
func TestControl(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a, b, errA, errB := pair(t, ca.TLS("host-a"), ca.TLS("lb"))
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	registered, told, flows := make(chan peer.Registration, 1), make(chan peer.Peers, 1), make(chan peer.FlowRecord, 1)
	a.Handle(peer.Control{Peers: func(p peer.Peers) { told <- p }})
	b.Handle(peer.Control{Register: func(r peer.Registration) { registered <- r }, Flows: func(r []peer.FlowRecord, last bool) {
		if last && len(r) == 1 {
			flows <- r[0]
		}
	}})
	moved := make(chan peer.Frame, 1)
	for _, c := range []*peer.Conn{a, b} {
		go func() {
			for {
				f, err := c.Receive()
				if err != nil {
					return
				}
				moved <- f
			}
		}()
	}
	r := peer.Registration{Address: netip.MustParseAddr("2001:db8::1"), Weight: 3, Services: []string{"bmp"}, Agent: "h:7"}
	p := peer.Peers{Members: []peer.Member{{Name: "host-a", Number: 3, Address: r.Address, Weight: 3, Up: true}},
		Services: []peer.Service{{Name: "bmp", ID: 4, Listen: netip.MustParseAddrPort("192.0.2.1:1790"), Proto: 6, BySource: true}}}
	flow := peer.FlowRecord{Flow: peer.Flow{Service: 4, Client: netip.MustParseAddrPort("192.0.2.7:1234")}, Epoch: 3, Quiet: true}
	if err := errors.Join(a.Register(r), b.Tell(p), a.TellFlows([]peer.FlowRecord{flow}, true), a.Send(peer.Frame{Message: move.Message{Kind: move.Buffer, Epoch: 1}})); err != nil {
		t.Fatal(err)
	}
	if got := <-registered; !reflect.DeepEqual(got, r) {
		t.Errorf("%+v", got)
	}
	if got := <-told; !reflect.DeepEqual(got, p) {
		t.Errorf("%+v", got)
	}
	if got := <-flows; got != flow {
		t.Errorf("%+v", got)
	}
	if got := <-moved; got.Message.Kind != move.Buffer {
		t.Errorf("%+v", got)
	}
	before := b.Heard()
	nstest.Until(t, "there is a sign of life", func() bool {
		if err := b.Ping(); err != nil {
			t.Fatal(err)
		}
		return b.Heard().After(before)
	})
	if !strings.Contains(b.Heard().String(), " m=") {
		t.Errorf("%s goes by a clock that may be set", b.Heard())
	}
}

// TestUnanswered checks that unanswered pings are counted until a frame arrives.
func TestUnanswered(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a, b, errA, errB := pair(t, ca.TLS("host-a"), ca.TLS("lb"))
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	nstest.Until(t, "three pings are unanswered", func() bool {
		if err := a.Ping(); err != nil {
			t.Fatal(err)
		}
		return a.Unanswered() >= 3
	})
	for _, c := range []*peer.Conn{a, b} {
		go func() { _, _ = c.Receive() }()
	}
	nstest.Eventually(t, func() error {
		if a.Unanswered() > 0 {
			return fmt.Errorf("%d pings are unanswered", a.Unanswered())
		}
		return nil
	})
}
