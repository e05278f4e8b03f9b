// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/kernel"
)

// tcxPrograms counts the programs at both tcx hooks of a device in the current namespace.
func tcxPrograms(index int) (n int, err error) {
	for _, side := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: side})
		if errors.Is(err, link.ErrNotSupported) {
			return 0, nil
		} else if err != nil {
			return 0, err
		}
		n += len(q.Programs)
	}
	return n, nil
}

// slots are the dispatcher slots seen by the tests of this process.
var slots = map[ebpf.MapID]bool{}

// dispatchers counts netfilter links running a dispatcher of this world's filters, including
// unpinned ones. It ignores links of other programs: the kernel does not report the namespace of a
// link.
func (w *world) dispatchers() (n int) {
	w.t.Helper()
	pins, err := filepath.Glob(w.root.Path() + "/*/filter/*/map_slot")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, pin := range pins {
		m, err := ebpf.LoadPinnedMap(pin, nil)
		if err != nil {
			w.t.Fatal(err)
		}
		info, err := m.Info()
		m.Close()
		if err != nil {
			w.t.Fatal(err)
		}
		if id, ok := info.ID(); ok {
			slots[id] = true
		}
	}
	var it link.Iterator
	defer it.Close()
	for it.Next() {
		info, err := it.Link.Info()
		if err != nil || info.Netfilter() == nil {
			continue
		}
		for id := range slots {
			if uses, err := kernel.ProgramUses(uint32(info.Program), id); err == nil && uses {
				n++
				break
			}
		}
	}
	return n
}

// withoutWeir removes weir's tables and their contents from a JSON ruleset.
func withoutWeir(t testing.TB, text string) string {
	t.Helper()
	var all struct {
		Nftables []map[string]map[string]any `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	var out strings.Builder
	for _, o := range all.Nftables {
		for kind, fields := range o {
			name, _ := fields["name"].(string)
			table, _ := fields["table"].(string)
			if kind == "metainfo" || kind == "table" && strings.HasPrefix(name, "weir_") || strings.HasPrefix(table, "weir_") {
				continue
			}
			b, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			out.Write(b)
			out.WriteByte('\n')
		}
	}
	return out.String()
}
