// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/weir-project/weir/feature/handoff/move"
)

// FuzzFrame checks that a parsed frame survives another round trip.
func FuzzFrame(f *testing.F) {
	whole := Frame{Message: move.Message{Kind: move.State, Epoch: 3}, Flow: Flow{1, netip.MustParseAddrPort("192.0.2.1:2")}}
	f.Add(append(whole.appendHeader(nil), "session"...))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parseFrame(b)
		if err != nil {
			return
		}
		again, err := parseFrame(append(got.appendHeader(nil), got.Session...))
		if err != nil || again.Message != got.Message || again.Flow != got.Flow || again.Instance != got.Instance || !bytes.Equal(again.Session, got.Session) {
			t.Errorf("%+v, then %+v, %v", got, again, err)
		}
	})
}

func FuzzHello(f *testing.F) {
	b, err := Hello{Number: 3, Instance: 9, Name: "host-a"}.append(nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parseHello(b)
		if err != nil {
			return
		}
		again, err := got.append(nil)
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("% x, then % x, %v", b, again, err)
		}
	})
}
