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

// Bindings lists the bindings of a namespace, by address.
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

// Opener opens an instance's pins: a [kernel.Root] for reading, a [kernel.WriteLock] for writing. Only writable maps
// can be mapped into memory. A table in read-only maps is copied as a whole.
type Opener interface {
	Open(i kernel.Instance, maps ...string) (*kernel.Opened, error)
}

// View is a namespace's dispatch, open for reading.
type View struct {
	Pins   *kernel.Opened
	Bound  *table.Bindings // nil until OpenBound
	Labels *engine.Labels
}

// OpenView opens the dispatch of a namespace. It returns ErrNotExist if the namespace never had a binding.
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

// OpenServices is OpenView without the bindings. It takes microseconds for any number of bindings.
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

// OpenBound opens the bindings unless they are open.
func (v *View) OpenBound() (err error) {
	if v.Bound == nil {
		v.Bound, err = engine.OpenBound(v.Pins.Maps, false)
	}
	return err
}

// HasSocket reports whether a service has a registered socket of a kind, as numbered by engine.KindOfPacket.
func (v *View) HasSocket(name string, kind uint32) (bool, error) {
	x, ok, err := v.Labels.Get(name)
	if err != nil || !ok {
		return false, err
	}
	e := &engine.Engine{Pins: v.Pins}
	return e.Given(x.ID, kind) != 0, nil
}

func (v *View) Close() {
	if v.Bound != nil {
		v.Bound.Close()
	}
	v.Pins.Close()
}

// BindingFilter selects bindings. The zero value selects all.
type BindingFilter struct {
	Service string
	Proto   Proto
	Within  netip.Prefix // bound to this prefix or a part of it
	Covers  netip.Addr   // bound to a prefix of this address
	Port    *uint16
}

// Match reports whether the filter selects a binding.
func (f BindingFilter) Match(b Binding) bool {
	return (f.Service == "" || f.Service == b.Service) && (f.Proto == 0 || f.Proto == b.Proto) &&
		(!f.Within.IsValid() || f.Within.Bits() <= b.Prefix.Bits() && f.Within.Contains(b.Prefix.Addr())) &&
		(!f.Covers.IsValid() || b.Prefix.Contains(f.Covers)) && (f.Port == nil || *f.Port == b.Port)
}

// bindingsFile is a bindings file of tubular or weir.
type bindingsFile struct {
	Bindings []Binding `json:"bindings"`
}

// WriteBindings returns the bindings in the format of parseBindings.
func WriteBindings(all []Binding) ([]byte, error) {
	if all == nil {
		all = []Binding{}
	}
	for _, b := range all {
		if !utf8.ValidString(b.Service) { // JSON cannot express it: the file would name another service
			return nil, fmt.Errorf("%w: the service name of %s %s port %d is not valid UTF-8: unbind it first", ErrBinding, b.Proto, b.Prefix, b.Port)
		}
	}
	return json.MarshalIndent(bindingsFile{all}, "", "  ")
}
