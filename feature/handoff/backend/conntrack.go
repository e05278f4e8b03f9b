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

// Connection tracking remembers a connection's windows. A session that moves away and back has advanced in the
// meantime. Its packets are then outside the remembered windows: conntrack marks them invalid, and firewalls drop
// them. The agent therefore deletes a session's entry after its departure and before a restore, and conntrack picks
// the connection up anew.

// untrack deletes the entries of a session, in every used zone. It looks up either direction, because one end may be
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
		a.o.Log.Warn("cannot delete a session's conntrack entry, its packets may become invalid", "flow", f, "err", err)
	}
}

// zones are the conntrack zones with entries. Zone 0 is always included.
type zones struct{ known atomic.Pointer[[]uint16] }

func (z *zones) get() []uint16 {
	if k := z.known.Load(); k != nil {
		return *k
	}
	return []uint16{0}
}

// zonesInterval is the interval for reading the zones.
const zonesInterval = 30 * time.Second

// watchZones reads the used conntrack zones repeatedly, because firewall rules set them and may change.
func (a *Agent) watchZones(ctx context.Context) {
	for range (feature.Loop{Every: zonesInterval}).Turns(ctx) {
		var now []uint16
		if err := a.inside(func() (err error) { now, err = conntrack.Zones(); return err }); err == nil {
			a.zones.known.Store(&now)
		} // otherwise keep the known zones: the kernel may lack ctnetlink
	}
}
