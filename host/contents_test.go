// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// Another writer's values in the maps are damage, not a crash: every command still answers, and weir remove with weir apply
// mends a service.
func TestWrongValuesInEveryMap(t *testing.T) {
	w, c, _ := damagedWorld(t)
	pins, err := filepath.Glob(filepath.Join(w.Root.Path(), "*", "*", "*", "map_*"))
	if err != nil || len(pins) < 30 {
		t.Fatalf("%d maps, %v", len(pins), err)
	}
	packet := feature.Packet{Proto: "udp", From: netip.MustParseAddrPort("192.0.2.1:9"), To: netip.MustParseAddrPort("127.0.0.1:4739")}
	written := 0
	for _, pin := range pins {
		name := strings.TrimPrefix(pin, w.Root.Path()+"/")
		for _, value := range []byte{0xff, 0x7f} {
			restore, err := overwrite(pin, value)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if restore == nil {
				continue
			}
			written++
			commands := map[string]func() error{
				"status": func() error { _, err := w.Reader("").Status(t.Context()); return err },
				"plan":   func() error { _, err := w.Plan(t.Context(), c); return err },
			}
			if value == 0xff {
				commands["explain"] = func() error { _, err := w.Explain(t.Context(), packet); return err }
				commands["upgrade"] = func() error { _, err := w.UpgradePlan(t.Context()); return err }
				commands["examine"] = func() error {
					for _, f := range features {
						if x, ok := f.Value.(feature.Examiner); ok {
							_, _ = x.Examine(t.Context(), w.Root)
						}
					}
					return nil
				}
			}
			for command, run := range commands {
				if trace := panics(run); trace != "" {
					t.Errorf("%s is %#x: %s: %s", name, value, command, trace)
				}
			}
			if err := restore(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	if written < 40 {
		t.Errorf("only %d times a map was overwritten", written)
	}
	// The remedy of an unreadable service mends it.
	if _, err := overwrite(filepath.Join(w.dirOf("steer telemetry"), "map_service"), 0xff); err != nil {
		t.Fatal(err)
	}
	if err := w.Remove(t.Context(), "steer", true); err != nil {
		t.Fatal(err)
	}
	w.apply(c)
	if _, err := w.Reader("").Status(t.Context()); err != nil {
		t.Error(err)
	}
}

// A lost pin is damage, not a crash, also without the records of the pins.
func TestEachPinLostWithoutRecords(t *testing.T) {
	w, c, _ := damagedWorld(t)
	if err := os.RemoveAll(kernel.RecordDir); err != nil {
		t.Fatal(err)
	}
	pins, err := filepath.Glob(filepath.Join(w.Root.Path(), "*", "*", "*", "*"))
	if err != nil || len(pins) < 40 {
		t.Fatalf("%d pins, %v", len(pins), err)
	}
	away := filepath.Join(nstest.BPFFS, "away")
	packet := feature.Packet{Proto: "udp", From: netip.MustParseAddrPort("192.0.2.1:9"), To: netip.MustParseAddrPort("127.0.0.1:4739")}
	for _, pin := range pins {
		if err := os.Rename(pin, away); err != nil {
			t.Fatal(err)
		}
		for command, run := range map[string]func() error{
			"status":  func() error { _, err := w.Reader("").Status(t.Context()); return err },
			"plan":    func() error { _, err := w.Plan(t.Context(), c); return err },
			"explain": func() error { _, err := w.Explain(t.Context(), packet); return err },
			"upgrade": func() error { _, err := w.UpgradePlan(t.Context()); return err },
		} {
			if trace := panics(run); trace != "" {
				t.Errorf("without %s: %s: %s", strings.TrimPrefix(pin, w.Root.Path()), command, trace)
			}
		}
		if err := os.Rename(away, pin); err != nil {
			t.Fatal(err)
		}
	}
}

// Without records weir apply still recovers lost pins, except those of an agent. weir remove removes all.
func TestLostPinsRecoveredWithoutRecords(t *testing.T) {
	w, c, _ := damagedWorld(t)
	pins, err := filepath.Glob(filepath.Join(w.Root.Path(), "*", "*", "*", "m*")) // maps and metas
	if err != nil || len(pins) < 40 {
		t.Fatalf("%d pins, %v", len(pins), err)
	}
	lose := func(pin string) {
		t.Helper()
		if err := errors.Join(os.RemoveAll(kernel.RecordDir), os.Remove(pin)); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	c.AllowOutage = true // a lost meta of a service is a lost admission
	recovered, dir := 0, ""
	for _, pin := range pins { // one map and the meta of each instance
		if strings.Contains(pin, "/handoff/") || filepath.Dir(pin) == dir && !strings.HasSuffix(pin, "/meta") {
			continue
		}
		dir = filepath.Dir(pin)
		lose(pin)
		name := strings.TrimPrefix(pin, w.Root.Path())
		err := w.Apply(t.Context(), c, func(Done) {})
		if err != nil && strings.HasSuffix(name, "/meta") && strings.Contains(name, "/steer/@") { // an engine's maps are unreadable without it
			err = errors.Join(w.Remove(t.Context(), "steer", true), w.Apply(t.Context(), c, func(Done) {}))
		}
		if err != nil {
			t.Errorf("without %s: %v", name, err)
		}
		faults, err := w.Faults(t.Context())
		if all := kernel.Damaged(faults); err != nil || len(all) > 0 {
			t.Errorf("without %s: %q after apply, %v", name, faults, err)
		}
		if _, err := w.Reader("").Status(t.Context()); err != nil {
			t.Errorf("without %s: status after apply: %v", name, err)
		}
		recovered++
	}
	if recovered < 16 {
		t.Errorf("%d pins lost", recovered)
	}
	for _, pin := range pins {
		if _, err := os.Stat(pin); err == nil && strings.HasSuffix(pin, "counts") {
			lose(pin)
		}
	}
	if err := w.Remove(t.Context(), "", true); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(w.Root.Path(), "*", "*", "*")); len(left) > 0 {
		t.Errorf("left after remove: %q", left)
	}
}

// A record under another instance's name, as user weir can write it, makes nothing of that instance.
func TestRecordUnderAnotherName(t *testing.T) {
	w, c, _ := damagedWorld(t)
	records, err := filepath.Glob(filepath.Join(kernel.RecordDir, "*", "*", "*+filter+tcx"))
	if err != nil || len(records) != 1 {
		t.Fatalf("%q, %v", records, err)
	}
	text, err := os.ReadFile(records[0])
	if err != nil {
		t.Fatal(err)
	}
	scope, _, _ := strings.Cut(filepath.Base(records[0]), "+")
	realScope := scope
	var rec struct{ Meta []byte }
	if err := json.Unmarshal(text, &rec); err != nil {
		t.Fatal(err)
	}
	cut := rec.Meta[:bytes.LastIndex(rec.Meta, []byte(`{"instance"`))] // what names the instance
	unnamed := bytes.Replace(text, []byte(base64.StdEncoding.EncodeToString(rec.Meta)), []byte(base64.StdEncoding.EncodeToString(cut)), 1)
	if len(unnamed) >= len(text) {
		t.Fatal("nothing was cut off")
	}
	all := [][3]string{{scope, "guard", "other"}, {scope, "filter", "other"}, {scope, "reroute", "@other"}, {scope, "steer", "other"}, {scope, "lb", "spec"},
		{kernel.HostScope, "filter", "tcx"}, {scope, "nofeature", "x"}, {scope, "guard", "@hooks"}, {scope, "handoff", "lb-z"}, {kernel.HostScope, "steer", "x"}}
	for n, name := range append(all, all...) {
		if n == len(all) {
			text = unnamed
		}
		scope := name[0]
		name := name[1:]
		forged := strings.NewReplacer(`"`+realScope+`"`, `"`+scope+`"`, `"filter"`, `"`+name[0]+`"`, `"tcx"`, `"`+name[1]+`"`).Replace(string(text))
		path := filepath.Join(filepath.Dir(records[0]), scope+"+"+name[0]+"+"+name[1])
		if _, err := os.Stat(path); err == nil {
			continue // of a real instance
		}
		if err := os.WriteFile(path, []byte(forged), 0o640); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if trace := panics(func() error { w.apply(c); return nil }); trace != "" {
				t.Errorf("%s: apply: %s", name, trace)
			}
		}
		if trace := panics(func() error { _, err := w.Reader("").Status(t.Context()); return err }); trace != "" {
			t.Errorf("%s: status: %s", name, trace)
		}
		if trace := panics(func() error { _, err := w.UpgradePlan(t.Context()); return err }); trace != "" {
			t.Errorf("%s: upgrade: %s", name, trace)
		}
		if _, err := os.Stat(filepath.Join(w.Root.Path(), scope, name[0], name[1])); err == nil {
			t.Errorf("%s has pins by a forged record", name)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
}

// panics runs f, and returns the place of a panic.
func panics(f func() error) (trace string) {
	defer func() {
		if p := recover(); p != nil {
			trace = fmt.Sprint(p)
			for line := range strings.Lines(string(debug.Stack())) {
				if strings.Contains(line, "/feature/") || strings.Contains(line, "/kernel/") {
					trace += "\n" + line
				}
			}
		}
	}()
	_ = f() // an error is right
	return ""
}

// overwrite fills the values of the entries with one byte. restore is nil for an empty map, or one that holds no plain values.
func overwrite(pin string, value byte) (restore func() error, err error) {
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		return nil, err
	}
	switch m.Type() {
	case ebpf.Hash, ebpf.Array, ebpf.LRUHash, ebpf.LPMTrie, ebpf.PerCPUArray, ebpf.PerCPUHash, ebpf.LRUCPUHash:
	default:
		return nil, m.Close()
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, err
	}
	size := int(m.ValueSize())
	if perCPU := m.Type() == ebpf.PerCPUArray || m.Type() == ebpf.PerCPUHash || m.Type() == ebpf.LRUCPUHash; perCPU {
		size = (size + 7) / 8 * 8 * cpus
	}
	type entry struct{ key, value []byte }
	var entries []entry
	key := make([]byte, m.KeySize())
	for err = m.NextKey(nil, key); err == nil && len(entries) < 64; err = m.NextKey(bytes.Clone(key), key) {
		old := make([]byte, size)
		if m.Lookup(key, old) == nil {
			entries = append(entries, entry{bytes.Clone(key), old})
		}
	}
	if len(entries) == 0 {
		return nil, m.Close()
	}
	put := func(of func(entry) []byte) error {
		for _, e := range entries {
			if err := m.Put(e.key, of(e)); err != nil {
				return err
			}
		}
		return nil
	}
	if err := put(func(entry) []byte { return bytes.Repeat([]byte{value}, size) }); err != nil {
		return nil, nil // a frozen map
	}
	return func() error {
		defer m.Close()
		return put(func(e entry) []byte { return e.value })
	}, nil
}
