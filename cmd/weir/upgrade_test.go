// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
)

func TestUpgradeCommand(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	const nothing = `nothing to upgrade: the programs in the kernel are of this version\n`
	s.run(0, nothing, "upgrade")
	file := configFile(t, "")
	s.run(0, `create .*`, "apply", "-f", file, "--allow-outage")
	s.run(0, nothing, "upgrade", "--dry-run")
	// Pins of another object, as described in docs/PINS.md.
	metas, err := filepath.Glob(s.root + "/*/steer/@lookup/meta")
	if err != nil || len(metas) != 1 {
		t.Fatal(metas, err)
	}
	m, err := ebpf.LoadPinnedMap(metas[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	b, err := m.LookupBytes(uint32(0))
	if err != nil {
		t.Fatal(err)
	}
	copy(b[16:48], make([]byte, 32))
	if err := m.Put(uint32(0), b); err != nil {
		t.Fatal(err)
	}
	const change = `object 000000000000 → [0-9a-f]{12}`
	const told = `engine sk_lookup of net:\[\d+\] runs the program of another weir version: ` + change + `: run weir upgrade\n`
	s.run(0, `SERVICE .*\n`+told, "status")
	s.run(0, `telemetry: .*\n`+told, "steer", "status")
	s.run(0, `.*warning: steer engine sk_lookup of net:\[\d+\]: its program is of weir devel: .*weir upgrade.*`, "doctor")
	const step = `upgrade engine sk_lookup of net:\[\d+\]: ` + change + `\n`
	s.run(0, "would "+step, "upgrade", "--dry-run")
	s.run(0, "would "+step, "apply", "-f", file, "--dry-run")
	s.run(0, step, "upgrade")
	s.run(0, nothing, "upgrade")
	s.run(0, `nothing to change\n`, "apply", "-f", file)
	s.run(0, `SERVICE [^\n]*\n[^\n]*\n`, "status")
	s.run(2, `weir: weir upgrade takes no arguments, got "now"; see weir upgrade --help\n`, "upgrade", "now")
}
