// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/releasetest"
)

func hello(t *testing.T, h Hello) []byte {
	t.Helper()
	b, err := h.append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// This version reads the frames of the agents of every release.
func TestFramesOfReleases(t *testing.T) {
	releasetest.Messages(t, "hello.json", map[string][]byte{
		"backend":       hello(t, Hello{Role: BackendAgent, Number: 3, Instance: 0x0102030405060708, Name: "s3"}),
		"load balancer": hello(t, Hello{Role: LBAgent, Instance: 0x1112131415161718, Name: "lb-a"}),
	}, func(b []byte) (any, error) { return parseHello(b) })

	moves := map[string][]byte{}
	for k := move.Buffer; k <= move.Left; k++ {
		f := Frame{Message: move.Message{Kind: k, From: move.AtLoadBalancer, To: move.AtDestination, Epoch: 0x01020304, Backend: 1023, OK: true},
			Flow: Flow{FlowService(63, 5), netip.MustParseAddrPort("192.0.2.1:50123")}, Instance: 0x2122232425262728}
		if carriesNonce(k) {
			f.Message.Nonce = 0x31323334
		} else {
			f.Message.Move = 0x41424344
		}
		moves[k.String()] = f.appendHeader(nil)
		if k == move.State {
			moves[k.String()] = append(moves[k.String()], "session"...)
		}
	}
	releasetest.Messages(t, "move.json", moves, func(b []byte) (any, error) {
		f, err := parseFrame(b)
		return struct {
			Frame Frame
			Kind  string
		}{f, fmt.Sprint(uint8(f.Message.Kind), f.Message.Kind)}, err
	})

	records := []FlowRecord{
		{Flow: Flow{Service: 63, Client: netip.MustParseAddrPort("192.0.2.1:65535")}, Owner: 1023, To: 1, Epoch: 1<<32 - 1, Age: 65535 * time.Second, Quiet: true},
		{Flow: Flow{Client: netip.MustParseAddrPort("[2001:db8::1]:1")}, Gone: true},
	}
	releasetest.Messages(t, "flows.json", map[string][]byte{"part": AppendFlows(nil, records, false), "last": AppendFlows(nil, records, true)}, func(b []byte) (any, error) {
		records, last, err := ParseFlows(b)
		return []any{records, last}, err
	})
}

// This version reads the JSON of the agents of every release: registrations and lists of backends.
func TestReportsOfReleases(t *testing.T) {
	text := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	a := netip.MustParseAddr("10.2.0.101")
	releasetest.Messages(t, "register.json", map[string][]byte{
		"register": text(Registration{Address: a, Weight: 3, Services: []string{"web"}, Agent: "10.2.0.101:7947", Unserved: []string{"bmp"}}),
	}, func(b []byte) (any, error) {
		var r Registration
		return &r, json.Unmarshal(b, &r)
	})
	releasetest.Messages(t, "peers.json", map[string][]byte{
		"rejected": text(Peers{Rejected: "number 1 belongs to s1"}),
		"peers": text(Peers{Members: []Member{{Name: "s1", Number: 1, Address: a, Agent: "10.2.0.101:7947", Weight: 3, Services: []string{"web"}, Up: true, Unserved: []string{"bmp"}, Connected: true}},
			Services:  []Service{{Name: "web", ID: 5, Listen: netip.MustParseAddrPort("192.0.2.1:80"), Proto: 6, BySource: true}},
			HearsLeft: true, Idle: 600000, BufferTimeout: 2000,
			Pair: &Pair{Ring: []Share{{Number: 1, Name: "s1", Weight: 3, Services: []int{5}, Unserved: []int{6}}}, Agents: 2, Carries: true, Starting: true}}),
	}, func(b []byte) (any, error) {
		var p Peers
		return &p, json.Unmarshal(b, &p)
	})
}
