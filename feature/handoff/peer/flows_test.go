// SPDX-License-Identifier: Apache-2.0

package peer_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/peer"
)

func TestFlowRecords(t *testing.T) {
	want := []peer.FlowRecord{
		{Flow: peer.Flow{Service: 63, Client: netip.MustParseAddrPort("192.0.2.1:65535")}, Owner: 1023, To: 1, Epoch: 1<<32 - 1, Age: 65535 * time.Second, Quiet: true},
		{Flow: peer.Flow{Client: netip.MustParseAddrPort("[2001:db8::1]:0")}, Gone: true},
	}
	b := peer.AppendFlows(nil, want, true)
	got, last, err := peer.ParseFlows(b)
	if err != nil || !last || !slices.Equal(got, want) {
		t.Errorf("%+v, %v, %v", got, last, err)
	}
	if _, last, err := peer.ParseFlows(b[:4]); err != nil || !last {
		t.Errorf("no records: %v, %v", last, err)
	}
	high := slices.Clone(b)
	high[4+20] = 4 // host 1024 or higher
	for _, bad := range [][]byte{nil, {2, 0, 0, 0}, b[:40], high} {
		if got, _, err := peer.ParseFlows(bad); err == nil {
			t.Errorf("%x: %+v", bad, got)
		}
	}
}
