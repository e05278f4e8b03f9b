// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"net/netip"
	"time"

	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
)

// Bounds of the time between a replay at the steering program and the record of the replay.
const (
	replayLate  = 100 * time.Millisecond // precision of the program's clock
	replayEarly = 10 * time.Second       // a batch of replays is recorded at its end
)

// exported is the traffic of one source.
type exported struct{ heard, replayed time.Time }

// Unreplayed corrects the times of devices whose latest datagram is weir's own replay: a program at the lookup cannot
// tell it from the exporter's. The time is then that of the exporter's latest flow message. After an error devices stay
// unchanged.
func Unreplayed(s *state.Service, r *kernel.Root, devices []state.Device) {
	t, err := Templates(s, r)
	if err != nil {
		return
	}
	sources := map[netip.Addr]exported{}
	for _, e := range t.Exporters {
		a := s.DeviceList.Stands(e.Address.Addr())
		x := sources[a]
		// The store forgets the latest message at its restoration, and keeps the time of the templates.
		for _, heard := range []time.Time{e.Last, e.Learnt} {
			if heard.After(x.heard) {
				x.heard = heard
			}
		}
		if e.Replayed.After(x.replayed) {
			x.replayed = e.Replayed
		}
		sources[a] = x
	}
	for i := range devices {
		d := &devices[i]
		if x, has := sources[d.Address]; has {
			d.LastUDP = x.last(d.LastUDP)
			if d.Last = d.LastUDP; d.LastTCP.After(d.Last) {
				d.Last = d.LastTCP
			}
		}
	}
}

// last returns the time of the latest datagram without replays.
func (x exported) last(seen time.Time) time.Time {
	if after := seen.Sub(x.replayed); x.replayed.IsZero() || after > replayLate || after < -replayEarly || x.heard.After(seen) {
		return seen
	}
	return x.heard
}
