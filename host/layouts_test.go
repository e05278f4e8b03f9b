// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	guardbpf "github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/feature/handoff/lb"
	lbbpf "github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	quarantinebpf "github.com/weir-project/weir/feature/handoff/quarantine/bpf"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	bfdbpf "github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/feature/reroute/liveness"
	livenessbpf "github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/feature/reroute/protect"
	protectbpf "github.com/weir-project/weir/feature/reroute/protect/bpf"
	steerbpf "github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/internal/releasetest"
	"github.com/weir-project/weir/kernel"
)

// pinnedInstance is the layout of an instance as a released version pinned it. Files pins.json of testdata/VERSION have
// them. A released file never changes.
type pinnedInstance struct {
	Instance string          `json:"instance"` // FEATURE/NAME
	Host     bool            `json:"host,omitempty"`
	ABI      uint32          `json:"abi"`
	Links    []string        `json:"links,omitempty"`  // without numbers of interfaces
	Config   json.RawMessage `json:"config,omitempty"` // of meta; null: another value on each host
	Maps     []pinnedMap     `json:"maps,omitempty"`
}

// pinnedMap is the layout of a pinned map.
type pinnedMap struct {
	Pin     string `json:"pin"`
	Name    string `json:"name"`             // in the kernel: 15 bytes
	Object  string `json:"object,omitempty"` // file of the BPF object; empty: weir creates the map without one
	Type    string `json:"type"`
	Key     uint32 `json:"key_size"`
	Value   uint32 `json:"value_size"`
	Entries uint32 `json:"max_entries"`
	Rule    string `json:"max_entries_rule,omitempty"` // empty: always this number
	Flags   uint32 `json:"flags"`
	Fields  struct {
		Key   []string `json:"key,omitempty"` // "offset size name", in bytes
		Value []string `json:"value,omitempty"`
	} `json:"fields,omitzero"`
}

// sizedBy are the pinned maps with a number of entries other than the object's, by name.
var sizedBy = map[string]string{
	"bound_many": "room for bindings", "bound_sets": "room for bindings", "bound_pages": "room for bindings",
	"steer_names": "length of the file of devices", "steer_peers": "key generations.peers", "filter_base": "rules and 2", "filter_counts": "rules and 2",
}

// bpfObject is an embedded object and the ABI of its maps.
type bpfObject struct {
	name, source string // source declares the ABI
	abi          uint32
	load         func() (*ebpf.CollectionSpec, error)
}

// bpfObjects are the objects with pinned maps. The programs of filters are compiled from their rules.
var bpfObjects = []bpfObject{
	{"steer", "feature/steer/record/layout.go", record.ABI, steerbpf.LoadSteer},
	{"reuse", "feature/steer/record/layout.go", record.ABI, steerbpf.LoadReuse},
	{"bind", "feature/steer/record/layout.go", record.ABI, steerbpf.LoadBind},
	{"copy", "feature/steer/record/layout.go", record.ABI, steerbpf.LoadCopy},
	{"templates", "feature/steer/record/layout.go", record.ABI, steerbpf.LoadTemplates},
	{"guard", "internal/guardstate", guardstate.ABI, guardbpf.LoadGuard},
	{"lb", "feature/handoff/lb/published.go", lb.ABI, lbbpf.LoadLB},
	{"quarantine", "feature/handoff/quarantine/quarantine.go", quarantine.Store.ABI, quarantinebpf.LoadQuarantine},
	{"protect", "feature/reroute/protect/published.go", protect.ABI, protectbpf.LoadProtect},
	{"liveness", "feature/reroute/liveness/published.go", liveness.ABI, livenessbpf.LoadLiveness},
	{"bfd", "feature/reroute/bfd/engine/instance.go", engine.ABI, bfdbpf.LoadBfd},
}

// innerMaps are the maps inside maps of maps, with the names of their types where the map has none.
var innerMaps = map[string]struct{ outer, key, value string }{
	"steer_service": {outer: "steer_services", value: "service"},
	"steer_alias":   {outer: "steer_aliases", key: "alias_key", value: "alias"},
	"steer_peers":   {outer: "steer_known", key: "peer_key", value: "peer"},
}

// objectMap returns the map of an object with a name in the kernel, or nil.
func objectMap(spec *ebpf.CollectionSpec, name string) *ebpf.MapSpec {
	if in, ok := innerMaps[name]; ok {
		outer := spec.Maps[in.outer]
		if outer == nil || outer.InnerMap == nil {
			return nil
		}
		m := outer.InnerMap.Copy()
		for _, of := range []struct {
			name string
			to   *btf.Type
		}{{in.key, &m.Key}, {in.value, &m.Value}} {
			var s *btf.Struct
			if of.name != "" && spec.Types.TypeByName(of.name, &s) == nil {
				*of.to = s
			}
		}
		return m
	}
	for full, m := range spec.Maps {
		if fmt.Sprintf("%.15s", full) == name {
			return m
		}
	}
	return nil
}

// fieldsOf lists the fields of a type as "offset size name", in bytes. An array of structs has the fields of its first
// element. Types of the kernel, such as bpf_timer, are one field.
func fieldsOf(t btf.Type) (out []string) {
	if t == nil {
		return nil
	}
	var walk func(name string, at uint32, t btf.Type)
	members := func(name string, at uint32, all []btf.Member) {
		for _, m := range all {
			full := m.Name
			if name != "" && m.Name != "" {
				full = name + "." + m.Name
			} else if m.Name == "" {
				full = name
			}
			if m.BitfieldSize > 0 {
				out = append(out, fmt.Sprintf("%d+%d %d/8 %s", at+m.Offset.Bytes(), m.Offset%8, m.BitfieldSize, full))
				continue
			}
			walk(full, at+m.Offset.Bytes(), m.Type)
		}
	}
	walk = func(name string, at uint32, t btf.Type) {
		size, err := btf.Sizeof(t)
		if err != nil {
			size = 0
		}
		leaf := func(name string) { out = append(out, strings.TrimSpace(fmt.Sprintf("%d %d %s", at, size, name))) }
		switch t := btf.UnderlyingType(t).(type) {
		case *btf.Struct:
			if strings.HasPrefix(t.Name, "bpf_") {
				leaf(name)
				return
			}
			members(name, at, t.Members)
		case *btf.Union:
			members(name, at, t.Members)
		case *btf.Array:
			name = fmt.Sprintf("%s[%d]", name, t.Nelems)
			leaf(name)
			switch btf.UnderlyingType(t.Type).(type) {
			case *btf.Struct, *btf.Union, *btf.Array:
				walk(name, at, t.Type)
			}
		default:
			leaf(name)
		}
	}
	walk("", 0, t)
	return out
}

// changedFields describes the fields with another offset or size, and the missing ones. Padding may become a field.
func changedFields(was, is []string) (out []string) {
	if was == nil {
		return nil // without types: the sizes are all
	}
	if is == nil {
		return []string{"the object has no types of it any more"}
	}
	now := map[string]string{}
	for _, f := range is {
		now[fieldName(f)] = f
	}
	for _, f := range was {
		name := fieldName(f)
		last := name[strings.LastIndexByte(name, '.')+1:]
		if strings.HasPrefix(last, "pad") || strings.HasPrefix(last, "_") || strings.HasPrefix(last, "zero") {
			continue
		}
		switch other, ok := now[name]; {
		case !ok:
			out = append(out, fmt.Sprintf("field %q (offset and size %s) is gone", name, strings.TrimSuffix(f, " "+name)))
		case other != f:
			out = append(out, fmt.Sprintf("field %q was at offset and size %s, and is at %s", name, strings.TrimSuffix(f, " "+name), strings.TrimSuffix(other, " "+name)))
		}
	}
	return out
}

func fieldName(f string) string {
	parts := strings.SplitN(f, " ", 3)
	if len(parts) < 3 {
		return ""
	}
	return parts[2]
}

// changed describes the differences of a map's layout from the one of a release.
func (was pinnedMap) changed(is pinnedMap) (out []string) {
	differs := func(what string, a, b any) {
		if a != b {
			out = append(out, fmt.Sprintf("%s was %v, and is %v", what, a, b))
		}
	}
	differs("its type", was.Type, is.Type)
	differs("its size of keys", was.Key, is.Key)
	differs("its size of values", was.Value, is.Value)
	differs("its flags", was.Flags, is.Flags)
	if was.Rule == "" {
		differs("its number of entries", was.Entries, is.Entries)
	}
	for _, c := range changedFields(was.Fields.Key, is.Fields.Key) {
		out = append(out, "key: "+c)
	}
	for _, c := range changedFields(was.Fields.Value, is.Fields.Value) {
		out = append(out, "value: "+c)
	}
	return out
}

// remedy is the end of every error about a layout.
func remedy(version, source string) string {
	return fmt.Sprintf("keep the layout of weir %s (a new field may use padding), or raise the ABI in %s and take the old pins over", version, source)
}

func releasedPins(t testing.TB, version string) (all []pinnedInstance) {
	t.Helper()
	releasetest.Read(t, version, "pins.json", &all)
	return all
}

// layoutNow describes a map of an object of this weir.
func layoutNow(o bpfObject, was pinnedMap) (pinnedMap, error) {
	spec, err := o.load()
	if err != nil {
		return pinnedMap{}, err
	}
	m := objectMap(spec, was.Name)
	if m == nil {
		return pinnedMap{}, errors.New("the object has no such map")
	}
	is := pinnedMap{Pin: was.Pin, Name: was.Name, Object: o.name, Type: m.Type.String(), Key: m.KeySize, Value: m.ValueSize, Entries: m.MaxEntries, Flags: m.Flags}
	is.Fields.Key, is.Fields.Value = fieldsOf(m.Key), fieldsOf(m.Value)
	return is, nil
}

// The maps of the objects have the layout of every release with the same ABI. This needs no kernel.
func TestLayoutsOfReleases(t *testing.T) {
	for _, version := range releasetest.Versions(t, "pins.json") {
		compared := 0
		for _, i := range releasedPins(t, version) {
			for _, was := range i.Maps {
				at := slices.IndexFunc(bpfObjects, func(o bpfObject) bool { return o.name == was.Object })
				if was.Object == "" {
					continue
				}
				if at < 0 {
					t.Errorf("%s: %s: object %s of map %s is missing in bpfObjects: add it", version, i.Instance, was.Object, was.Pin)
					continue
				}
				if o := bpfObjects[at]; o.abi == i.ABI {
					compared++
					for _, c := range layoutChanges(o, was) {
						t.Errorf("%s: map %s of %s, ABI %d: %s: %s", o.name, was.Pin, i.Instance, i.ABI, c, remedy(version, o.source))
					}
				}
			}
		}
		if compared < 50 {
			t.Errorf("%s: only %d maps were compared", version, compared)
		}
	}
}

// Recovery rejects a record without a needed map, so each needed map must exist in every release.
func TestNeededMapsOfReleases(t *testing.T) {
	needed := 0
	for _, version := range releasetest.Versions(t, "pins.json") {
		for _, i := range releasedPins(t, version) {
			dir, name, _ := strings.Cut(i.Instance, "/")
			inst := kernel.Instance{Scope: "4026531840", Feature: dir, Name: name}
			if i.Host {
				inst.Scope = kernel.HostScope
			}
			names, ok := neededMaps(inst)
			if !ok {
				t.Errorf("%s: %s is of no feature: see feature.Recorded", version, inst)
			}
			for _, pin := range names {
				needed++
				if !slices.ContainsFunc(i.Maps, func(m pinnedMap) bool { return m.Pin == pin }) {
					t.Errorf("%s: %s has no map %s", version, inst, pin)
				}
			}
		}
	}
	if needed < 50 {
		t.Errorf("only %d needed maps", needed)
	}
}

// Recovery knows the maps of every release by their names in the kernel.
func TestMapsOfReleasesAreOwn(t *testing.T) {
	for _, version := range releasetest.Versions(t, "pins.json") {
		for _, i := range releasedPins(t, version) {
			for _, m := range i.Maps {
				if !ownMap(m.Name) {
					t.Errorf("%s: map %s of %s: %s is no name of any feature: see feature.Mapped", version, m.Pin, i.Instance, m.Name)
				}
			}
		}
	}
}

func layoutChanges(o bpfObject, was pinnedMap) []string {
	is, err := layoutNow(o, was)
	if err != nil {
		return []string{err.Error()}
	}
	return was.changed(is)
}

// Every change of a layout is found and named.
func TestChangedLayoutsAreFound(t *testing.T) {
	version := releasetest.Versions(t, "pins.json")[0]
	var was pinnedMap
	for _, i := range releasedPins(t, version) {
		if i.Instance == "steer/@lookup" {
			was = i.Maps[slices.IndexFunc(i.Maps, func(m pinnedMap) bool { return m.Pin == "slots" })]
		}
	}
	if len(was.Fields.Value) < 3 || len(layoutChanges(bpfObjects[0], was)) > 0 {
		t.Fatalf("%+v", was)
	}
	for name, c := range map[string]struct {
		change func(m *pinnedMap)
		want   string
	}{
		"moved":   {func(m *pinnedMap) { m.Fields.Value[1] = "96 4 " + fieldName(m.Fields.Value[1]) }, "was at offset and size"},
		"gone":    {func(m *pinnedMap) { m.Fields.Value[0] = "0 4 former" }, `value: field "former" (offset and size 0 4) is gone`},
		"value":   {func(m *pinnedMap) { m.Value++ }, "its size of values was"},
		"key":     {func(m *pinnedMap) { m.Key++ }, "its size of keys was"},
		"type":    {func(m *pinnedMap) { m.Type = "Hash" }, "its type was Hash, and is Array"},
		"flags":   {func(m *pinnedMap) { m.Flags |= 1 }, "its flags was"},
		"entries": {func(m *pinnedMap) { m.Entries++ }, "its number of entries was"},
		"map":     {func(m *pinnedMap) { m.Name = "steer_former" }, "no such map"},
	} {
		t.Run(name, func(t *testing.T) {
			m := was
			m.Fields.Value = slices.Clone(was.Fields.Value)
			c.change(&m)
			if got := layoutChanges(bpfObjects[0], m); len(got) != 1 || !strings.Contains(got[0], c.want) {
				t.Errorf("found %q, want %q", got, c.want)
			}
		})
	}
	m := was
	m.Fields.Value = append(slices.Clone(was.Fields.Value), "30 2 pad")
	if got := layoutChanges(bpfObjects[0], m); len(got) > 0 {
		t.Errorf("padding became a field: %q", got)
	}
}
