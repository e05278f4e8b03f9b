// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
	"golang.org/x/sys/unix"
)

// Binding directs traffic to the addresses of a prefix, for a protocol and a port, to a service. The longest matching
// prefix decides. For one prefix, a binding of the port wins over a binding of every port. A longer prefix of another
// port or protocol has no effect.
//
// The JSON form is tubular's.
type Binding struct {
	Service string       `json:"label"`
	Prefix  netip.Prefix `json:"prefix"` // masked; IPv4 never as v4-mapped
	Port    uint16       `json:"port"`   // 0: every port
	Proto   Proto        `json:"protocol"`
}

// Proto is a protocol by its number, written tcp or udp.
type Proto uint8

// String returns tcp or udp.
func (p Proto) String() string {
	switch p {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	}
	return fmt.Sprintf("protocol %d", uint8(p))
}

// MarshalText implements encoding.TextMarshaler.
func (p Proto) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Proto) UnmarshalText(text []byte) error {
	switch string(text) {
	case "tcp":
		*p = unix.IPPROTO_TCP
	case "udp":
		*p = unix.IPPROTO_UDP
	default:
		return fmt.Errorf("%w: protocol %q: want tcp or udp", ErrBinding, text)
	}
	return nil
}

var (
	// ErrBinding is wrapped by every error about the content of a binding.
	ErrBinding = errors.New("invalid binding")
	// ErrUnbound is wrapped by the errors about a missing binding.
	ErrUnbound = errors.New("no such binding")
	// ErrBound means that a configured service listens on the prefix already.
	ErrBound = errors.New("taken")
)

// ParsePrefix parses an address or a prefix. v4-mapped IPv6 becomes IPv4. Bits beyond the length are an error:
// 192.0.2.7/24 could mean one address or all 256.
func ParsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		var a netip.Addr
		if a, err = netip.ParseAddr(s); err == nil {
			p = netip.PrefixFrom(a, a.BitLen())
		}
	}
	if _, zone, ok := strings.Cut(s, "%"); ok {
		zone, _, _ = strings.Cut(zone, "/")
		return p, fmt.Errorf("%w: %q: zones are not supported: leave out %%%s", ErrBinding, s, zone)
	}
	if err != nil {
		return p, fmt.Errorf("%w: %.80q is not an address or prefix: want one like 192.0.2.0/24 or 2001:db8::1", ErrBinding, s)
	}
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	if m := p.Masked(); m != p {
		return p, fmt.Errorf("%w: %q has bits set beyond its length: write %s, or %s for the single address", ErrBinding, s, m, p.Addr())
	}
	return p, nil
}

// CheckUnicast returns an error for a prefix without a unicast address. The kernel delivers such packets to every
// socket bound to the address, without a lookup program. IPv6 link-local addresses need a zone, unknown to a binding.
func CheckUnicast(p netip.Prefix) error {
	kind := ""
	switch a := p.Addr(); {
	case a.IsMulticast() && p.Bits() >= 4 && (a.Is4() || p.Bits() >= 8):
		kind = "a multicast"
	case p == netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), 32):
		kind = "the broadcast"
	case a.Is6() && a.IsLinkLocalUnicast() && p.Bits() >= 10:
		kind = "an IPv6 link-local"
	default:
		return nil
	}
	return fmt.Errorf("%w: %s is %s address, and no lookup program gets its packets: bind unicast addresses", ErrBinding, p, kind)
}

// String formats the binding for people.
func (b Binding) String() string {
	port := fmt.Sprint(b.Port)
	if b.Port == 0 {
		port = "every port"
	}
	return fmt.Sprintf("%s %s %s → %s", b.Proto, b.Prefix, port, b.Service)
}

func (b Binding) key() table.Key {
	return table.Key{Prefix: b.Prefix, Proto: uint8(b.Proto), Port: b.Port}
}

// withRoom calls f. If the table is full, it enlarges the table and calls f again.
func withRoom(l *kernel.WriteLock, ns *netns.Handle, room int, f func(*dispatch) error) error {
	for {
		d, err := openDispatch(l, ns, room)
		if err != nil {
			return err
		}
		have := engine.Room(d.Pins.Maps)
		err = f(d)
		d.Close()
		if !errors.Is(err, table.ErrFull) || have >= table.MaxBindings {
			return err
		}
		room = roomFor(have + 1)
	}
}

// Bind binds one prefix with one store, so every packet sees the state before or after it. It returns the previously
// bound service, if any.
func Bind(l *kernel.WriteLock, ns *netns.Handle, b Binding) (was string, err error) {
	if _, err := checkBindings(l.Root, record.Scope(ns), []Binding{b}); err != nil {
		return "", err
	}
	err = withRoom(l, ns, engine.FewestBindings, func(d *dispatch) error {
		return d.change(func() error {
			was, err = d.bind(b)
			return err
		})
	})
	return was, err
}

func (d *dispatch) bind(b Binding) (was string, err error) {
	x, err := d.acquire(b.Service)
	if err != nil {
		return "", err
	}
	old, had := d.bound.Get(b.key())
	if had && old == x.ID+1 {
		return b.Service, nil
	}
	k := b.key()
	if err := d.bound.Set(table.Binding{Prefix: k.Prefix, Proto: k.Proto, Port: k.Port, Value: x.ID + 1}); err != nil {
		return "", err
	}
	kernel.Step("steer:bound")
	x.Bindings++
	if err := d.labels.Put(b.Service, x); err != nil || !had {
		return "", err
	}
	was, err = d.labels.Name(old - 1)
	if err == nil {
		err = d.unbound(was)
	}
	return was, err
}

// unbound decrements a name's count of bindings. It forgets a name without bindings and sockets.
func (d *dispatch) unbound(name string) error {
	x, ok, err := d.labels.Get(name)
	if err != nil || !ok {
		return err
	}
	x.Bindings--
	if x.Bindings == 0 && !d.HasSocket(x.ID) {
		return d.labels.Forget(name)
	}
	return d.labels.Put(name, x)
}

// Unbind removes one binding. Its traffic then goes to the next shorter prefix, or to the kernel's own choice.
func Unbind(l *kernel.WriteLock, ns *netns.Handle, b Binding) error {
	missing := fmt.Errorf("%w: %s %s port %d is not bound", ErrUnbound, b.Proto, b.Prefix, b.Port)
	d, err := openDispatchThere(l, ns)
	if errors.Is(err, kernel.ErrNotExist) {
		return missing
	} else if err != nil {
		return err
	}
	defer d.Close()
	id, ok := d.bound.Get(b.key())
	if !ok {
		return missing
	}
	x, ok, err := d.labels.Get(b.Service)
	if err != nil {
		return err
	}
	if !ok || x.ID != id-1 {
		name, err := d.labels.Name(id - 1)
		if err != nil {
			return err
		}
		return fmt.Errorf("%w: %s %s port %d is bound to %s, not to %s", ErrUnbound, b.Proto, b.Prefix, b.Port, name, b.Service)
	}
	err = d.change(func() error {
		if _, err := d.bound.Delete(b.key()); err != nil {
			return err
		}
		kernel.Step("steer:unbound")
		return d.unbound(b.Service)
	})
	if err != nil {
		return err
	}
	return d.removeIdle()
}

// checkBindings validates bindings in a namespace and sorts them.
func checkBindings(r *kernel.Root, scope string, all []Binding) ([]bindingOrder, error) {
	services := map[string]*record.Service{}
	var listens []Binding
	for _, kind := range record.Engines {
		of, _, err := record.ReadAll(r, scope, kind)
		if err != nil {
			return nil, err
		}
		for name, p := range of {
			services[name] = p
			for _, ep := range p.Service.Endpoints() {
				listens = append(listens, Binding{name, ep.Prefix.Masked(), ep.Port, Proto(ep.Proto)})
			}
		}
	}
	listening := make(map[table.Key]string, len(listens))
	for _, b := range listens {
		listening[b.key()] = b.Service
	}
	for _, b := range all {
		if err := checkLabel(b.Service); err != nil {
			return nil, err
		}
		if by, ok := listening[b.key()]; ok {
			return nil, fmt.Errorf("%w: service %s already listens on %s %s port %d", ErrBound, by, b.Proto, b.Prefix, b.Port)
		}
		p := services[b.Service]
		if p == nil {
			continue
		}
		if p.Engine != spec.EngineSkLookup {
			return nil, fmt.Errorf("%w: service %s uses engine %s, which sees only packets for its own sockets: set engine: sk_lookup", ErrBinding, b.Service, p.Engine)
		}
		if kind := engine.KindOfPacket(b.Proto == unix.IPPROTO_TCP, !b.Prefix.Addr().Is4()); engine.NamedEndpoints(p).Endpoint[kind] == engine.NoEndpoint {
			return nil, fmt.Errorf("%w: service %s has no socket for %s over %s: add a listen for it", ErrBinding, b.Service, b.Proto, familyName(!b.Prefix.Addr().Is4()))
		}
	}
	order := bindingsInOrder(all)
	for i, o := range order {
		b := all[o.at]
		if i > 0 && o.compare(order[i-1]) == 0 && all[order[i-1].at].Service != b.Service {
			return nil, fmt.Errorf("%w: %s %s port %d is bound to both %s and %s", ErrBinding, b.Proto, b.Prefix, b.Port, all[order[i-1].at].Service, b.Service)
		}
	}
	return order, nil
}

func familyName(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}
