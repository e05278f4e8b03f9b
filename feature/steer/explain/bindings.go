// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
)

// bound follows the bindings of a packet. s is the service with a matching listen, or nil. It returns the configured
// service that a binding leads to. done means that the explanation ends here. Otherwise no binding decides.
func (x *explainer) bound(r *kernel.Root, st state.State, s *state.Service) (to *state.Service, endpoint int, done bool, err error) {
	v, err := bindings.OpenView(r, record.Scope(x.ns))
	if errors.Is(err, kernel.ErrNotExist) || errors.Is(err, kernel.ErrDamaged) {
		return nil, 0, false, nil
	} else if err != nil {
		return nil, 0, false, err
	}
	defer v.Close()
	b, ok := v.Bound.Lookup(x.p.To.Addr().Unmap(), x.p.Number(), x.p.To.Port())
	if !ok {
		x.say("bindings", "none matches %s to %s", x.p.Proto, x.p.To)
		return nil, 0, false, nil
	}
	name, err := v.Labels.Name(b.Value - 1)
	if err != nil {
		return nil, 0, false, err
	}
	port := "every port"
	if b.Port != 0 {
		port = fmt.Sprintf("port %d", b.Port)
	}
	if s != nil && state.BestEndpoint(s.Endpoints, x.p.Number(), x.p.To) >= b.Prefix.Bits() {
		x.say("bindings", "%s %s is bound to %s for %s, but service %s listens on a prefix of at least this length", x.p.Proto, b.Prefix, name, port, s.Name)
		return nil, 0, false, nil
	}
	x.say("bindings", "%s %s is bound to %s for %s, the longest prefix for the packet", x.p.Proto, b.Prefix, name, port)
	var where bpf.SteerNamed
	if err := v.Pins.Maps["named"].Lookup(b.Value-1, &where); err != nil {
		return nil, 0, false, err
	}
	kind := engine.KindOfPacket(x.p.Proto == "tcp", x.p.To.Addr().Unmap().Is6())
	if where.Service == 0 {
		return nil, 0, true, x.registered(v.Pins.Maps["given"], name, b.Value-1, kind)
	}
	switch endpoint = int(where.Endpoint[kind]); endpoint {
	case engine.Bypassed:
		x.warn("bypass", "service %s is bypassed: weir bypass --off %s steers it again", name, name)
		return nil, 0, false, nil
	case engine.NoEndpoint:
		x.result("rejected: service %s has no listen for %s", name, bindings.KindName(kind))
		return nil, 0, true, nil
	}
	for i := range st.Services {
		if o := &st.Services[i]; o.Name == name && o.Inode == x.ns.Inode() {
			return o, endpoint, false, nil
		}
	}
	x.result("rejected: service %s is being removed", name)
	return nil, 0, true, nil
}

// registered explains the registered socket for a service's packets of a kind.
func (x *explainer) registered(given *ebpf.Map, name string, id, kind uint32) error {
	var cookie uint64
	if given.Lookup(id*engine.KindsIPv4+kind, &cookie) != nil || cookie == 0 {
		x.say("sockets", "no open socket is registered for %s of %s", bindings.KindName(kind), name)
		x.result("rejected until a socket is registered: weir steer register %s", name)
		return nil
	}
	states := uint32(1 << sockdiag.Close)
	if x.p.Proto == "tcp" {
		states = 1 << sockdiag.Listen
	}
	var socks []sockdiag.Socket
	err := x.ns.Do(func() (err error) {
		socks, err = sockdiag.Dump(sockdiag.Query{Proto: x.p.Number(), States: states})
		return err
	})
	if err != nil {
		return err
	}
	for _, s := range socks {
		if s.Cookie == cookie {
			x.say("sockets", "the socket at %s is registered for %s of %s", s.Local, bindings.KindName(kind), name)
			if n := state.Sharing(socks, s); n > 1 {
				x.say("sockets", "%d sockets share this port: the kernel or their own program chooses among them", n)
			}
			x.gives(s, nil)
			return nil
		}
	}
	x.result("rejected: the socket registered for %s of %s is closing", bindings.KindName(kind), name)
	return nil
}
