// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/conntrack"
	"github.com/weir-project/weir/feature/handoff/repair"
)

// Connection tracking remembers the windows of a connection. A session that leaves and comes back is elsewhere in its streams by then:
// its packets are outside of the windows, thus invalid, and firewalls drop them. So the entry of a session goes when the session has
// left, and before it is restored: conntrack then picks the connection up anew.

// untrack deletes the entries of a session, in every zone that is in use. It finds an entry by either direction: one end of it may be
// translated (NAT).
func (a *Agent) untrack(f repair.Flow) {
	err := a.inside(func() error {
		var errs []error
		for _, zone := range a.zones.get() {
			for _, t := range []struct{ from, to netip.AddrPort }{{f.Remote, f.Local}, {f.Local, f.Remote}} {
				if err := conntrack.Delete(t.from, t.to, zone); !errors.Is(err, conntrack.ErrNone) {
					errs = append(errs, err)
				}
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		a.o.Log.Warn("conntrack keeps a session's entry, and may take its packets for invalid", "flow", f, "err", err)
	}
}

// zones are those in which conntrack has entries; the one by default is always there.
type zones struct{ known atomic.Pointer[[]uint16] }

func (z *zones) get() []uint16 {
	if k := z.known.Load(); k != nil {
		return *k
	}
	return []uint16{0}
}

// zonesInterval is how often zones are looked for.
const zonesInterval = 30 * time.Second

// watchZones looks which zones of conntrack are in use at the services' addresses. Rules set them, and may change.
func (a *Agent) watchZones(ctx context.Context) {
	for range (feature.Loop{Every: zonesInterval}).Turns(ctx) {
		var now []uint16
		if err := a.inside(func() (err error) { now, err = conntrack.Zones(); return err }); err == nil {
			a.zones.known.Store(&now)
		} // else what was known stays: this kernel may have no ctnetlink
	}
}
