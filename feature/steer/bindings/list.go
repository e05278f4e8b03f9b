// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Named is a service with bindings or registered sockets.
type Named struct {
	Service    string             `json:"service"`
	Bindings   int                `json:"bindings"`
	Configured bool               `json:"configured"` // by weir apply: the service has slots
	Sockets    []RegisteredSocket `json:"sockets,omitempty"`
	Steered    uint64             `json:"steered"`  // datagrams, and lookups of a listener
	Rejected   uint64             `json:"rejected"` // without a socket
	Failed     uint64             `json:"failed"`   // the kernel rejected the socket
}

// RegisteredSocket is a registered socket.
type RegisteredSocket struct {
	Kind   string         `json:"kind"` // "udp4", "tcp4", "udp6", "tcp6"
	Cookie uint64         `json:"cookie"`
	Local  netip.AddrPort `json:"local,omitzero"` // if the user may read it
}

// NamedServices lists the services of a namespace with bindings or registered sockets, by name.
func NamedServices(_ context.Context, r *kernel.Root, scope string) ([]Named, error) {
	return Registered(r, scope, true)
}

// Registered is NamedServices. With where it includes the sockets' local addresses.
func Registered(r *kernel.Root, scope string, where bool) ([]Named, error) {
	v, err := OpenView(r, scope)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer v.Close()
	all, err := v.Labels.All()
	if err != nil {
		return nil, err
	}
	var at map[uint64]netip.AddrPort
	if where {
		at = localAddresses(r, scope)
	}
	e := &engine.Engine{Pins: v.Pins}
	out := make([]Named, 0, len(all))
	for name, x := range all {
		n := Named{Service: name, Bindings: int(x.Bindings)}
		var to bpf.SteerNamed
		if err := v.Pins.Maps["named"].Lookup(x.ID, &to); err != nil {
			return nil, err
		}
		n.Configured = to.Service != 0
		for kind := range uint32(engine.KindsIPv4) {
			if cookie := e.Given(x.ID, kind); cookie != 0 {
				n.Sockets = append(n.Sockets, RegisteredSocket{KindName(kind), cookie, at[cookie]})
			}
		}
		hits, err := kernel.SumPerCPU[bpf.SteerHits](v.Pins.Maps["hits"], x.ID)
		if err != nil {
			return nil, err
		}
		n.Steered, n.Rejected, n.Failed = hits.Steered, hits.Rejected, hits.Failed
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b Named) int {
		if a.Service < b.Service {
			return -1
		}
		return 1
	})
	return out, nil
}

// localAddresses returns the local addresses of the namespace's listeners and unconnected UDP sockets, by cookie.
// Without permission it is empty.
func localAddresses(r *kernel.Root, scope string) map[uint64]netip.AddrPort {
	out := map[uint64]netip.AddrPort{}
	ns, err := r.OpenScope("", scope)
	if err != nil {
		return out
	}
	defer ns.Close()
	_ = ns.Do(func() error {
		for _, q := range []sockdiag.Query{
			{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Listen},
			{Proto: unix.IPPROTO_UDP, States: 1 << sockdiag.Close},
		} {
			socks, err := sockdiag.Dump(q)
			if err != nil {
				return err
			}
			for _, s := range socks {
				out[s.Cookie] = s.Local
			}
		}
		return nil
	})
	return out
}
