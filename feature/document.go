// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"cmp"
	"slices"

	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/service"
)

// Document is a configuration file as features read it: the host's own keys are not part of it.
type Document struct {
	Services []Service // in order of name
	Sections Sections  // of the file
	// Rate limits slow work that follows from the change, such as resets. nil: the rate of each section.
	Rate *Rate
}

// Service is one entry of the file's services with the sections of features in it.
type Service struct {
	service.Spec
	Sections Sections
}

// Sections are the parts of a mapping that features have declared, by key. A value is what the feature's
// Section or ServiceSection returned, decoded. Keys absent from the file are absent.
type Sections map[string]any

// Section returns the value of key as the type that its feature declared. ok is false if the file lacks the key.
// Another type than the declared one panics.
func Section[T any](s Sections, key string) (value T, ok bool) {
	v, ok := s[key]
	if !ok {
		return value, false
	}
	return *v.(*T), true
}

// Sectioned is implemented by features with a key of their name at the top of the file.
type Sectioned interface {
	// Section returns a pointer to a new value, for package strictyaml to decode the key's value into.
	Section() any
}

// Nested is implemented by features whose section is below a key that several share: handoff.keeper, handoff.backend.
type Nested interface {
	Under() string
}

// ServiceSectioned is implemented by features with a key of their name in each service.
type ServiceSectioned interface {
	// ServiceSection returns a pointer to a new value, for package strictyaml to decode the key's value into.
	ServiceSection() any
}

// Claim is a location that has room for one program. Two features that claim the same one are refused when the file is read.
type Claim struct {
	strictyaml.Pos
	Object   string // the key in the file: "filter.sip"
	Location string // "XDP of eth0"
	Netns    string // as the file names it
	Remedy   string // what to change in the file for this claim to go: "use hook tcx or clsact for the filter"
}

// XDPLocation is the Location of a device's XDP hook.
func XDPLocation(device string) string { return "XDP of " + device }

// Claimer is implemented by features with such locations.
type Claimer[C any] interface {
	Claims(spec C) []Claim
}

// Keys lists the keys of declared features at the top of the file.
func Keys(all []Declared) []string {
	return keys(all, func(d Declared) bool { return d.section != nil })
}

// ServiceKeys lists the keys of declared features in a service.
func ServiceKeys(all []Declared) []string {
	return keys(all, func(d Declared) bool { return d.serviceSection != nil })
}

func keys(all []Declared, has func(Declared) bool) (out []string) {
	for _, d := range all {
		key := cmp.Or(d.under, d.Name)
		if has(d) && !slices.Contains(out, key) {
			out = append(out, key)
		}
	}
	return out
}

// nest is a key that several features share.
type nest struct {
	under    string
	all      []Declared
	sections Sections
}

// Keys implements strictyaml.Extended.
func (n *nest) Keys() (out []string) {
	for _, d := range n.all {
		if d.under == n.under {
			out = append(out, d.Name)
		}
	}
	return out
}

// Section implements strictyaml.Extended.
func (n *nest) Section(key string) any {
	for _, d := range n.all {
		if d.Name == key && d.under == n.under {
			n.sections[key] = d.section()
			return n.sections[key]
		}
	}
	return nil
}

// Open adds the value of a key at the top of the file and returns a pointer for decoding; nil for a key of no feature.
func (s Sections) Open(all []Declared, key string) any {
	if slices.ContainsFunc(all, func(d Declared) bool { return d.under == key }) {
		return &nest{key, all, s}
	}
	return s.open(all, key, func(d Declared) func() any { return d.section })
}

// OpenService is Open for a key of a service.
func (s Sections) OpenService(all []Declared, key string) any {
	return s.open(all, key, func(d Declared) func() any { return d.serviceSection })
}

func (s Sections) open(all []Declared, key string, of func(Declared) func() any) any {
	for _, d := range all {
		if section := of(d); d.Name == key && d.under == "" && section != nil {
			s[key] = section()
			return s[key]
		}
	}
	return nil
}
