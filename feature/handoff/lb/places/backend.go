// SPDX-License-Identifier: Apache-2.0

package places

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/lb/ring"
	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/move"
)

// Backend is a backend behind the load balancer: on the same segment, or at the other end of a tunnel. See [locate.Location].
type Backend struct {
	Number    move.Backend // 1 to spec.MaxBackends
	Name      string       // key of the rendezvous hash: stays when numbers change
	Interface int          // index of the load balancer's interface towards it
	MAC       net.HardwareAddr
	Weight    int        // share of new flows; 0: none
	Tunnel    netip.Addr // the other end, in place of Interface and MAC; see package tunnel
	Services  []int      // it gets new flows of these alone; nil: of all
	Unserved  []int      // services without a member there: other backends, if any, get their new flows
	Unwell    bool       // the backend loses reopened connections, and connections whose SYNs it leaves unanswered or resets
}

// Key returns the backend's location.
func (h Backend) Key() locate.Key {
	return locate.Location{Interface: h.Interface, MAC: h.MAC, Tunnel: h.Tunnel}.Key()
}

// Equal reports whether two backends are the same to the data path.
func (h Backend) Equal(b Backend) bool {
	return h.Number == b.Number && h.Name == b.Name && h.Interface == b.Interface && h.MAC.String() == b.MAC.String() && h.Weight == b.Weight &&
		h.Tunnel == b.Tunnel && slices.Equal(h.Services, b.Services) && slices.Equal(h.Unserved, b.Unserved) && h.Unwell == b.Unwell
}

func (h Backend) check() error {
	switch {
	case h.Number == 0 || h.Number > spec.MaxBackends:
		return fmt.Errorf("backend %s: number %d: want 1 to %d", h.Name, h.Number, spec.MaxBackends)
	case h.Name == "":
		return fmt.Errorf("backend %d has no name", h.Number)
	case h.Weight < 0:
		return fmt.Errorf("backend %s: weight %d: it must not be below 0", h.Name, h.Weight)
	case h.Tunnel.IsValid():
		return nil
	case len(h.MAC) != 6:
		return fmt.Errorf("backend %s: MAC address %q: give one of six bytes", h.Name, h.MAC)
	case h.Interface <= 0:
		return fmt.Errorf("backend %s: no interface leads to it", h.Name)
	}
	return nil
}

// Check returns an error for backends that cannot be in one data path.
func Check(backends []Backend) error {
	errs := checkLocations(backends)
	seen := map[move.Backend]bool{}
	for _, h := range backends {
		errs = append(errs, h.check())
		if seen[h.Number] {
			errs = append(errs, fmt.Errorf("backend %s: another one has number %d", h.Name, h.Number))
		}
		seen[h.Number] = true
	}
	return errors.Join(errs...)
}

// checkLocations returns an error for each location with two backends. The data path identifies a backend by its location.
func checkLocations(backends []Backend) (errs []error) {
	at := map[locate.Key]string{}
	for _, h := range backends {
		key := h.Key()
		if o, taken := at[key]; taken {
			errs = append(errs, fmt.Errorf("backend %s: location %s is backend %s's: give each backend a machine of its own", h.Name, key, o))
		}
		at[key] = h.Name
	}
	return errs
}

// Buckets is the number of buckets of a service. Each belongs to one backend.
const Buckets = ring.Buckets

// Ring returns the backend of each bucket of a service.
func Ring(backends []Backend, service int) []uint16 {
	backends = slices.DeleteFunc(slices.Clone(backends), func(h Backend) bool { return h.Services != nil && !slices.Contains(h.Services, service) })
	served := slices.DeleteFunc(slices.Clone(backends), func(h Backend) bool { return slices.Contains(h.Unserved, service) })
	if slices.ContainsFunc(served, func(h Backend) bool { return h.Weight > 0 }) {
		backends = served
	}
	shares := make([]ring.Share, len(backends))
	for i, h := range backends {
		shares[i] = ring.Share{Number: uint16(h.Number), Name: h.Name, Weight: h.Weight}
	}
	return ring.New(shares)
}

// Awaits reports whether backends of want are missing in have.
func Awaits(have []Backend, want map[move.Backend]bool) bool {
	missing := len(want)
	for _, h := range have {
		if want[h.Number] {
			missing--
		}
	}
	return missing > 0
}
