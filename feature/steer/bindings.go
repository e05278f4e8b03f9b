// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// Binding leads what is sent to the addresses of a prefix, by a protocol and to a
// port, to a service. The longest prefix that is bound for a packet decides; of one
// prefix, the binding of the port goes before that of every port. A longer prefix
// that is bound for another port or protocol hides nothing.
//
// As JSON it is a binding of tubular's.
type Binding struct {
	Service string       `json:"label"`
	Prefix  netip.Prefix `json:"prefix"` // masked; IPv4 never as v4-mapped
	Port    uint16       `json:"port"`   // 0: every port
	Proto   Proto        `json:"protocol"`
}

// Proto is a protocol by its number, written tcp or udp.
type Proto uint8

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
	// ErrBinding is wrapped by every error about what a binding says.
	ErrBinding = errors.New("no such binding")
	// ErrBound says that a service of the configuration has what was to be bound.
	ErrBound = errors.New("taken")
)

// ParsePrefix reads an address or a prefix as bindings have it: bits behind the
// length are dropped, and v4-mapped IPv6 is IPv4.
func ParsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		var a netip.Addr
		if a, err = netip.ParseAddr(s); err == nil {
			p = netip.PrefixFrom(a, a.BitLen())
		}
	}
	if err != nil || p.Addr().Zone() != "" {
		return p, fmt.Errorf("%w: %q is no address and no prefix: want one like 192.0.2.0/24 or 2001:db8::1", ErrBinding, s)
	}
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), nil
}

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

// withRoom returns f's error, having made room as long as the bindings are full.
func withRoom(l *kernel.WriteLock, ns *netns.Handle, room int, f func(*dispatch) error) error {
	for {
		d, err := openDispatch(l, ns, room)
		if err != nil {
			return err
		}
		have := roomOf(d.pins.Maps)
		err = f(d)
		d.Close()
		if !errors.Is(err, table.ErrFull) || have >= table.MostBindings {
			return err
		}
		room = roomFor(have + 1)
	}
}

// Bind binds one prefix, in one store: every packet meets the state before or after
// it. It returns the service to which it was bound before, if any.
func Bind(l *kernel.WriteLock, ns *netns.Handle, b Binding) (was string, err error) {
	if _, err := checkBindings(l.Root, scopeOf(ns), []Binding{b}); err != nil {
		return "", err
	}
	err = withRoom(l, ns, fewestBindings, func(d *dispatch) error {
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
	if err := d.labels.put(b.Service, x); err != nil || !had {
		return "", err
	}
	was, err = d.labels.nameOf(old - 1)
	if err == nil {
		err = d.unbound(was)
	}
	return was, err
}

// unbound counts one binding less of a name, and forgets it when that was all.
func (d *dispatch) unbound(name string) error {
	x, ok, err := d.labels.get(name)
	if err != nil || !ok {
		return err
	}
	x.Bindings--
	if x.Bindings == 0 && !d.hasSocket(x.ID) {
		return d.labels.forget(name)
	}
	return d.labels.put(name, x)
}

// Unbind removes one binding. What it covered meets the next shorter prefix, or
// the kernel's own choice.
func Unbind(l *kernel.WriteLock, ns *netns.Handle, b Binding) error {
	missing := fmt.Errorf("%w: %s %s port %d is not bound", ErrBinding, b.Proto, b.Prefix, b.Port)
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
	x, ok, err := d.labels.get(b.Service)
	if err != nil {
		return err
	}
	if !ok || x.ID != id-1 {
		name, err := d.labels.nameOf(id - 1)
		if err != nil {
			return err
		}
		return fmt.Errorf("%w: %s %s port %d is bound to %s, not to %s", ErrBinding, b.Proto, b.Prefix, b.Port, name, b.Service)
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
	return d.leave()
}

// Diff is what a change of many bindings does.
type Diff struct {
	Added   []Binding
	Removed []Binding
	Moved   []Moved
	Same    int
}

// Moved is a binding that leads to another service than before.
type Moved struct {
	Binding
	From string
}

// Empty says that nothing changes.
func (x Diff) Empty() bool { return len(x.Added)+len(x.Removed)+len(x.Moved) == 0 }

// ReplaceBindings has a namespace have these bindings and no others, all at once: a
// packet meets all the old ones or all the new.
func ReplaceBindings(l *kernel.WriteLock, ns *netns.Handle, all []Binding) (Diff, error) {
	return setBindings(l, ns, all, false)
}

// AddBindings adds bindings, all at once.
func AddBindings(l *kernel.WriteLock, ns *netns.Handle, more []Binding) (Diff, error) {
	return setBindings(l, ns, more, true)
}

func setBindings(l *kernel.WriteLock, ns *netns.Handle, want []Binding, keep bool) (diff Diff, err error) {
	order, err := checkBindings(l.Root, scopeOf(ns), want)
	if err != nil {
		return diff, err
	}
	if len(want) == 0 { // nothing is to come, and perhaps nothing was ever there
		d, err := openDispatchThere(l, ns)
		if errors.Is(err, kernel.ErrNotExist) {
			return diff, nil
		} else if err != nil {
			return diff, err
		}
		defer d.Close()
		if diff, err = d.set(want, order, keep); err == nil {
			err = d.leave()
		}
		return diff, err
	}
	err = withRoom(l, ns, roomFor(len(want)), func(d *dispatch) (err error) {
		diff, err = d.set(want, order, keep)
		return err
	})
	return diff, err
}

// set replaces all bindings, or with keep adds some.
func (d *dispatch) set(want []Binding, order []bindingOrder, keep bool) (diff Diff, err error) {
	have, err := d.labels.read(d.bound)
	if err != nil {
		return diff, err
	}
	diff, kept := have.diff(want, order, keep)
	if diff.Empty() {
		return diff, nil
	}
	return diff, d.change(func() error {
		ids := map[string]uint32{}
		counts := map[string]uint32{}
		for _, b := range want {
			if _, ok := ids[b.Service]; ok {
				continue
			}
			x, err := d.acquire(b.Service)
			if err != nil {
				return err
			}
			ids[b.Service] = x.ID
		}
		all := make([]table.Binding, 0, len(want)+len(kept))
		for i, o := range order {
			if i > 0 && o.compare(order[i-1]) == 0 {
				continue
			}
			b := &want[o.at]
			all = append(all, table.Binding{Prefix: b.Prefix, Proto: uint8(b.Proto), Port: b.Port, Value: ids[b.Service] + 1})
			counts[b.Service]++
		}
		for _, at := range kept {
			all = append(all, have.all[at])
			counts[have.names[have.all[at].Value-1]]++
		}
		kernel.Step("steer:named all")
		if err := d.bound.Replace(all); err != nil {
			return err
		}
		kernel.Step("steer:bound all")
		return d.count(counts)
	})
}

// count writes how many bindings lead to each name, and forgets those that nothing
// leads to and that have no socket.
func (d *dispatch) count(counts map[string]uint32) error {
	all, err := d.labels.all()
	if err != nil {
		return err
	}
	for name, x := range all {
		switch n := counts[name]; {
		case n == 0 && !d.hasSocket(x.ID):
			err = d.labels.forget(name)
		case n != x.Bindings:
			err = d.labels.put(name, label{x.ID, n})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// boundNow is what is bound, and the names of the numbers.
type boundNow struct {
	all   []table.Binding
	order []bindingOrder
	names map[uint32]string
}

func (s *labels) read(b *table.Bindings) (out boundNow, err error) {
	out = boundNow{all: make([]table.Binding, 0, b.Len()), names: map[uint32]string{}}
	all, err := s.all()
	if err != nil {
		return out, err
	}
	for name, x := range all {
		out.names[x.ID] = name
	}
	for x, err := range b.All() {
		if err != nil {
			return out, err
		}
		out.all = append(out.all, x)
	}
	out.order = inOrder(len(out.all), func(i int) table.Key { return out.all[i].Key() })
	return out, nil
}

func (n boundNow) binding(at int32) Binding {
	x := n.all[at]
	return Binding{Service: n.names[x.Value-1], Prefix: x.Prefix, Port: x.Port, Proto: Proto(x.Proto)}
}

// diff compares with what is wanted, and its order. What is bound and not wanted is
// removed, or with keep returned.
func (n boundNow) diff(want []Binding, order []bindingOrder, keep bool) (out Diff, kept []int32) {
	was := make([]int32, len(want)) // index of what is bound now, and 1 more
	var others []int32
	added, next := len(want), 0
	for _, o := range n.order {
		for ; next < len(order) && order[next].compare(o) <= 0; next++ {
			if order[next].compare(o) == 0 {
				was[order[next].at] = o.at + 1
				added--
			}
		}
		if next == 0 || order[next-1].compare(o) != 0 {
			others = append(others, o.at)
		}
	}
	out.Added = slices.Grow(out.Added, added)
	for i, b := range want {
		if was[i] == 0 {
			out.Added = append(out.Added, b)
		} else if from := n.names[n.all[was[i]-1].Value-1]; from != b.Service {
			out.Moved = append(out.Moved, Moved{b, from})
		} else {
			out.Same++
		}
	}
	if keep {
		return out, others
	}
	out.Removed = slices.Grow(out.Removed, len(others))
	for _, at := range others {
		out.Removed = append(out.Removed, n.binding(at))
	}
	return out, nil
}

// DiffBindings is what ReplaceBindings would do, or AddBindings with keep.
func DiffBindings(r *kernel.Root, scope string, want []Binding, keep bool) (Diff, error) {
	order, err := checkBindings(r, scope, want)
	if err != nil {
		return Diff{}, err
	}
	v, err := openView(r, scope)
	if errors.Is(err, kernel.ErrNotExist) {
		diff, _ := boundNow{}.diff(want, order, keep)
		return diff, nil
	} else if err != nil {
		return Diff{}, err
	}
	defer v.Close()
	now, err := v.labels.read(v.bound)
	if err != nil {
		return Diff{}, err
	}
	diff, _ := now.diff(want, order, keep)
	return diff, nil
}

// Bindings lists what is bound in a namespace, by address.
func Bindings(_ context.Context, r *kernel.Root, scope string) ([]Binding, error) {
	v, err := openView(r, scope)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer v.Close()
	now, err := v.labels.read(v.bound)
	if err != nil {
		return nil, err
	}
	out := make([]Binding, 0, len(now.order))
	for _, o := range now.order {
		out = append(out, now.binding(o.at))
	}
	return out, nil
}

// view is a namespace's dispatch, open for reading.
type view struct {
	pins   *kernel.Opened
	bound  *table.Bindings
	labels *labels
}

// openView returns ErrNotExist where nothing was ever bound.
func openView(r *kernel.Root, scope string) (*view, error) {
	i := engineInstance(scope, EngineSkLookup)
	pins, err := r.Open(i)
	if err != nil {
		return nil, err
	}
	if err = knownABI(pins.Meta, "namespace "+scope); err == nil && roomOf(pins.Maps) == 0 {
		err = fmt.Errorf("bindings of namespace %s: %w", scope, kernel.ErrNotExist)
	}
	v := &view{pins: pins, labels: &labels{pins.Maps}}
	if err == nil {
		v.bound, err = openBound(pins.Maps, false)
	}
	if err != nil {
		pins.Close()
		return nil, err
	}
	return v, nil
}

func (v *view) Close() {
	v.bound.Close()
	v.pins.Close()
}

// checkBindings says what is wrong with bindings in a namespace, or sorts them.
func checkBindings(r *kernel.Root, scope string, all []Binding) ([]bindingOrder, error) {
	services := map[string]*published{}
	var listens []Binding
	for _, kind := range kinds {
		of, err := readServices(r, scope, kind)
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
		if _, err := keyOfLabel(b.Service); err != nil {
			return nil, err
		}
		if by, ok := listening[b.key()]; ok {
			return nil, fmt.Errorf("%w: service %s listens to %s %s port %d by itself", ErrBound, by, b.Proto, b.Prefix, b.Port)
		}
		p := services[b.Service]
		if p == nil {
			continue
		}
		if p.Engine != EngineSkLookup {
			return nil, fmt.Errorf("%w: service %s is steered by %s, which sees only what reaches its own sockets: give it engine: sk_lookup", ErrBinding, b.Service, p.Engine)
		}
		if kind := kindOfPacket(b.Proto == unix.IPPROTO_TCP, !b.Prefix.Addr().Is4()); p.named().Endpoint[kind] == noEndpoint {
			return nil, fmt.Errorf("%w: service %s has no socket for %s over %s: add a listen for it", ErrBinding, b.Service, b.Proto, familyName(!b.Prefix.Addr().Is4()))
		}
	}
	order := bindingsInOrder(all)
	for i, o := range order {
		b := all[o.at]
		if i > 0 && o.compare(order[i-1]) == 0 && all[order[i-1].at].Service != b.Service {
			return nil, fmt.Errorf("%w: %s %s port %d is to be bound to %s and to %s", ErrBinding, b.Proto, b.Prefix, b.Port, all[order[i-1].at].Service, b.Service)
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

// BindingFilter selects bindings; its zero value selects all.
type BindingFilter struct {
	Service string
	Proto   Proto
	Within  netip.Prefix // bound to this prefix or a part of it
	Covers  netip.Addr   // bound to a prefix that has this address
	Port    *uint16
}

// Match says whether a binding is selected.
func (f BindingFilter) Match(b Binding) bool {
	return (f.Service == "" || f.Service == b.Service) && (f.Proto == 0 || f.Proto == b.Proto) &&
		(!f.Within.IsValid() || f.Within.Bits() <= b.Prefix.Bits() && f.Within.Contains(b.Prefix.Addr())) &&
		(!f.Covers.IsValid() || b.Prefix.Contains(f.Covers)) && (f.Port == nil || *f.Port == b.Port)
}

// bindingsFile is a file of bindings, tubular's or weir's.
type bindingsFile struct {
	Bindings []Binding `json:"bindings"`
}

// WriteBindings writes bindings as ParseBindings reads them.
func WriteBindings(all []Binding) ([]byte, error) {
	if all == nil {
		all = []Binding{}
	}
	return json.MarshalIndent(bindingsFile{all}, "", "  ")
}

// nameOf finds the name of a number. It reads all names.
func (s *labels) nameOf(id uint32) (string, error) {
	all, err := s.all()
	if err != nil {
		return "", err
	}
	for name, x := range all {
		if x.ID == id {
			return name, nil
		}
	}
	return "", fmt.Errorf("service number %d has no name", id)
}

// forget frees a name's number.
func (s *labels) forget(name string) error {
	k, err := keyOfLabel(strings.Clone(name))
	if err != nil {
		return err
	}
	return s.maps["labels"].Delete(k)
}
