// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"cmp"
	"slices"

	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/service"
)

// Document is a configuration file as read by features. It omits the host's own keys.
type Document struct {
	Services []Service // sorted by name
	Sections Sections  // sections of the file
	// Rate limits slow work after the change, such as resets. nil: the rate of each section.
	Rate *Rate
}

// Service is an entry of the file's services, with its feature sections.
type Service struct {
	service.Spec
	Sections Sections
}

// Sections are the declared parts of a mapping, by key. A value is the decoded result of the feature's Section or
// ServiceSection. Keys missing from the file are missing here.
type Sections map[string]any

// Section returns the value of key with its declared type. ok is false if the file lacks the key. It panics for another
// type.
func Section[T any](s Sections, key string) (value T, ok bool) {
	v, ok := s[key]
	if !ok {
		return value, false
	}
	return *v.(*T), true
}

// Sectioned is implemented by features with a top-level key of their name.
type Sectioned interface {
	// Section returns a pointer to a new value, for decoding by package strictyaml.
	Section() any
}

// Nested is implemented by features with a section below a shared key: handoff.keeper, handoff.backend.
type Nested interface {
	Under() string
}

// ServiceSectioned is implemented by features with a key of their name in each service.
type ServiceSectioned interface {
	// ServiceSection returns a pointer to a new value, for decoding by package strictyaml.
	ServiceSection() any
}

// Claim is the use of a hook with room for one program. Reading a file fails if two features claim the same hook.
type Claim struct {
	strictyaml.Pos
	Object   string // key in the file: "filter.sip"
	Location string // hook: "XDP of eth0"
	Netns    string // name in the file
	Remedy   string // change of the file to release this claim: "use hook tcx or clsact for the filter"
}

// XDPLocation returns the Location of a device's XDP hook.
func XDPLocation(device string) string { return "XDP of " + device }

// Claimer is implemented by features with such hooks.
type Claimer[C any] interface {
	Claims(spec C) []Claim
}

// Keys lists the top-level keys of declared features.
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

// nest is a key shared by several features.
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

// Open adds the value of a top-level key and returns a pointer for decoding, or nil if no feature has the key.
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
