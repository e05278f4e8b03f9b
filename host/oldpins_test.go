// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/releasetest"
	"github.com/weir-project/weir/kernel"
)

// everyPin extends a configuration with everyFeature by the instances and maps that only some keys need.
func everyPin(t *testing.T) string {
	t.Helper()
	ca := peertest.NewAuthority(t)
	cert, key, root := ca.Files("s1")
	cert2, key2, _ := ca.Files("lb")
	routers := filepath.Join(t.TempDir(), "routers")
	if err := os.WriteFile(routers, []byte("r1 192.0.2.1 192.0.2.2\nr2 192.0.2.3\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	more := fmt.Sprintf(`  trial: {listen: [udp 0.0.0.0:14750], steer: {slots: 1}}
  routers: {listen: [udp 0.0.0.0:4750], steer: {slots: 2, by: device, devices: %s, copy: trial}}
  shared:
`, routers)
	return strings.NewReplacer("limit: 20kpps", "limit: 20kpps, each: 5kpps", "  shared:\n", more).Replace(everyFeature) +
		fmt.Sprintf(sectionsOfHandoff, cert, key, root, cert2, key2, root)
}

// everyPinWorld is a host with every instance and every map that weir pins.
func everyPinWorld(t *testing.T) (w world, c *Config) {
	t.Helper()
	w, c, _, _ = damagedWorldOf(t, everyPin(t), kernel.TCXLink, kernel.NetfilterLink)
	w.bind("dns", "127.20.0.0/16")
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	l, err := w.Root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	store, err := templates.OpenStore(l, ns)
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	store.Close()
	e, err := engine.OpenHanded(t.Context(), w.Root, ns, 5*time.Millisecond, engine.Handed{Text: []byte(`{"frr":"unix:/run/frr/bfd-dplane"}`)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return w, c
}

// pinsNow describes all pins.
func (w world) pinsNow() (all []pinnedInstance) {
	w.t.Helper()
	instances, err := w.Root.Instances("")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, i := range instances {
		o, err := w.Root.Open(i)
		if err != nil {
			w.t.Fatal(err)
		}
		p := pinnedInstance{Instance: i.Feature + "/" + i.Name, Host: i.Scope == kernel.HostScope, ABI: o.Meta.ABI, Config: settled(w.t, o.Meta.Config)}
		links, err := o.Links()
		if err != nil {
			w.t.Fatal(err)
		}
		for _, name := range links {
			name = numbers.ReplaceAllString(name, "N")
			if !slices.Contains(p.Links, name) {
				p.Links = append(p.Links, name)
			}
		}
		for pin, m := range o.Maps {
			p.Maps = append(p.Maps, describePin(w.t, p.Instance, pin, m))
		}
		o.Close()
		slices.SortFunc(p.Maps, func(a, b pinnedMap) int { return strings.Compare(a.Pin, b.Pin) })
		all = append(all, p)
	}
	return all
}

// numbers are the numbers of interfaces in the names of links.
var numbers = regexp.MustCompile(`[0-9]+$`)

// volatile are the keys of a meta with another value on each host.
var volatile = []string{"seed", "pid", "netns", "inode", "cookie", "discriminators", "key_file", "Certificate", "Key", "CA"}

// settled returns a meta's configuration with null in place of values that differ between hosts.
func settled(t testing.TB, config []byte) json.RawMessage {
	t.Helper()
	var v any
	if err := json.Unmarshal(config, &v); err != nil {
		t.Fatal(err)
	}
	var settle func(v any) any
	settle = func(v any) any {
		switch v := v.(type) {
		case map[string]any:
			for k, x := range v {
				if path, ok := x.(string); slices.Contains(volatile, k) || ok && k == "devices" && strings.HasPrefix(path, "/") {
					v[k] = nil
				} else {
					v[k] = settle(x)
				}
			}
		case []any:
			for i, x := range v {
				v[i] = settle(x)
			}
		}
		return v
	}
	b, err := json.Marshal(settle(v))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// describePin describes a pinned map. The fields of keys and values come from the object with the same map.
func describePin(t testing.TB, instance, pin string, m *ebpf.Map) pinnedMap {
	t.Helper()
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	p := pinnedMap{Pin: pin, Name: info.Name, Type: info.Type.String(), Key: info.KeySize, Value: info.ValueSize, Entries: info.MaxEntries, Rule: sizedBy[info.Name], Flags: info.Flags}
	for _, o := range bpfObjects {
		is, err := layoutNow(o, p)
		own := instance != "steer/@reuse" || o.name != "steer"
		if err == nil && own && is.Type == p.Type && is.Key == p.Key && is.Value == p.Value {
			p.Object, p.Fields = o.name, is.Fields
			break
		}
	}
	return p
}

// This weir pins what a release with the same ABI pinned: instances, maps with their layout, links, and the keys of meta.
func TestPinsOfReleases(t *testing.T) {
	w, _ := everyPinWorld(t)
	now := w.pinsNow()
	if releasetest.Writing() != "" {
		text, err := json.MarshalIndent(now, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		releasetest.Write(t, "pins.json", append(text, '\n'))
	}
	for _, version := range releasetest.Versions(t, "pins.json") {
		for _, was := range releasedPins(t, version) {
			for _, c := range was.differences(now) {
				t.Errorf("%s, ABI %d: %s: %s", was.Instance, was.ABI, c, remedy(version, "the store of the instance"))
			}
		}
	}
}

// differences describes how the instance differs from the one of this weir. Other ABIs may differ.
func (was pinnedInstance) differences(now []pinnedInstance) (out []string) {
	at := slices.IndexFunc(now, func(p pinnedInstance) bool { return p.Instance == was.Instance && p.Host == was.Host })
	if at < 0 {
		return []string{"the instance is gone"}
	}
	is := now[at]
	if is.ABI != was.ABI {
		return nil
	}
	for _, m := range was.Maps {
		at := slices.IndexFunc(is.Maps, func(o pinnedMap) bool { return o.Pin == m.Pin })
		if at < 0 {
			out = append(out, fmt.Sprintf("map %s is gone", m.Pin))
			continue
		}
		for _, c := range m.changed(is.Maps[at]) {
			out = append(out, fmt.Sprintf("map %s: %s", m.Pin, c))
		}
	}
	for _, l := range was.Links {
		if !slices.Contains(is.Links, l) {
			out = append(out, fmt.Sprintf("link %s is gone", l))
		}
	}
	for _, lost := range releasetest.Lost(was.Config, is.Config) {
		out = append(out, "meta: "+lost)
	}
	return out
}
