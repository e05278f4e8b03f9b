// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"unicode/utf8"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// Bindings lists what is bound in a namespace, by address.
func Bindings(_ context.Context, r *kernel.Root, scope string) ([]Binding, error) {
	v, err := OpenView(r, scope)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer v.Close()
	now, err := read(v.Labels, v.Bound)
	if err != nil {
		return nil, err
	}
	out := make([]Binding, 0, len(now.order))
	for _, o := range now.order {
		out = append(out, now.binding(o.at))
	}
	return out, nil
}

// Opener opens an instance's pins: a [kernel.Root] for reading, a [kernel.WriteLock] for writing. Only maps that may be written to
// can be mapped; a table in others is read as a copy of all of it.
type Opener interface {
	Open(i kernel.Instance, maps ...string) (*kernel.Opened, error)
}

// View is a namespace's dispatch, open for reading.
type View struct {
	Pins   *kernel.Opened
	Bound  *table.Bindings // nil until OpenBound
	Labels *engine.Labels
}

// OpenView returns ErrNotExist where nothing was ever bound.
func OpenView(o Opener, scope string) (*View, error) {
	v, err := OpenServices(o, scope)
	if err != nil {
		return nil, err
	}
	if err := v.OpenBound(); err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

// OpenServices is OpenView without the bindings themselves: it is a matter of microseconds, however many there are.
func OpenServices(o Opener, scope string) (*View, error) {
	i := record.EngineInstance(scope, spec.EngineSkLookup)
	pins, err := o.Open(i)
	if err != nil {
		return nil, err
	}
	if err = pins.Meta.RequireABI(i, record.ABI); err == nil && engine.Room(pins.Maps) == 0 {
		err = fmt.Errorf("bindings of namespace %s: %w", scope, kernel.ErrNotExist)
	}
	if err != nil {
		pins.Close()
		return nil, err
	}
	return &View{Pins: pins, Labels: &engine.Labels{Maps: pins.Maps}}, nil
}

// OpenBound opens the bindings, unless they are open.
func (v *View) OpenBound() (err error) {
	if v.Bound == nil {
		v.Bound, err = engine.OpenBound(v.Pins.Maps, false)
	}
	return err
}

// HasSocket says whether a socket of a kind, as engine.KindOfPacket numbers them, is registered for a service.
func (v *View) HasSocket(name string, kind uint32) (bool, error) {
	x, ok, err := v.Labels.Get(name)
	if err != nil || !ok {
		return false, err
	}
	e := &engine.Engine{Pins: v.Pins}
	return e.Given(x.ID, kind) != 0, nil
}

// Close closes the maps.
func (v *View) Close() {
	if v.Bound != nil {
		v.Bound.Close()
	}
	v.Pins.Close()
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

// WriteBindings writes bindings as parseBindings reads them.
func WriteBindings(all []Binding) ([]byte, error) {
	if all == nil {
		all = []Binding{}
	}
	for _, b := range all {
		if !utf8.ValidString(b.Service) { // JSON has no way to write it: the file would name another service
			return nil, fmt.Errorf("%w: the name of the service of %s %s port %d is no UTF-8, and cannot be written: unbind it first", ErrBinding, b.Proto, b.Prefix, b.Port)
		}
	}
	return json.MarshalIndent(bindingsFile{all}, "", "  ")
}
