// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel/probe"
)

func TestMoveDrainBypass(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	file := configFile(t, ", seed: 7")
	s.run(0, `create .*`, "apply", "-f", file, "--allow-outage")
	slot := spec.Assign(2)[spec.Bucket(7, netip.MustParseAddr("192.0.2.7"))]
	other := fmt.Sprint(1 - slot)
	s.run(0, `would move 192.0.2.7: slot `+fmt.Sprint(slot)+` → `+other+` of telemetry\n`, "steer", "move", "telemetry", "--device", "192.0.2.7", "--to", other, "--dry-run")
	s.run(0, `.*\n192.0.2.7 +\d+ +`+fmt.Sprint(slot)+`.*`, "steer", "where", "192.0.2.7")
	s.run(0, ``, "steer", "move", "telemetry", "--device", "192.0.2.7", "--to", other)
	s.run(0, `.*\n192.0.2.7 +\d+ +`+other+` \(moved\).*`, "steer", "where", "192.0.2.7")
	s.run(0, `nothing to change\nwarning: 1 device and 0 buckets of service telemetry stay .*`, "apply", "-f", file)
	s.run(0, `.*\n  moved: 192.0.2.7 to slot `+other+`\n`, "steer", "status")
	s.run(1, `weir: no such slot: 2: telemetry has slots 0 to 1\n`, "steer", "move", "telemetry", "--device", "192.0.2.7", "--to", "2")
	s.run(1, `weir: cannot move: bucket 5 has not been moved\n`, "steer", "move", "telemetry", "--bucket", "5", "--back")
	s.run(1, `weir: the change would take .*device 192.0.2.7 is served by slot 0 .*`, "steer", "move", "telemetry", "--device", "192.0.2.7", "--back")
	s.run(0, ``, "steer", "move", "telemetry", "--device", "192.0.2.7", "--back", "--allow-outage")
	s.run(0, ``, "steer", "drain", "telemetry", "--slot", "1")
	s.run(0, `.*  1 +empty, drained .*`, "steer", "status")
	s.run(0, `nothing to change\nwarning: slot 1 of service telemetry is drained until weir steer undrain telemetry --slot 1\n`, "apply", "-f", file)
	s.run(1, `weir: cannot move: no other slot of telemetry has weight\n`, "steer", "drain", "telemetry", "--slot", "0")
	s.run(0, `.*warning: steer telemetry: slot 1 is drained\n.*`, "doctor")
	refused := `weir: the change would take served traffic or working protection away; nothing was changed:\n  slot 1 of service telemetry is empty.*: no member is configured: name a member for it, or set its weight to 0\nfix the reason, or give --allow-outage\n`
	s.run(0, `outage: slot 1 of service telemetry is empty and would get 50 % .*`, "steer", "undrain", "telemetry", "--slot", "1", "--dry-run")
	s.run(1, refused, "steer", "undrain", "telemetry", "--slot", "1")
	s.run(0, ``, "steer", "undrain", "telemetry", "--slot", "1", "--allow-outage")
	s.run(0, `telemetry is bypassed: the kernel alone chooses, until weir bypass --off telemetry\n`, "bypass", "telemetry")
	s.run(0, `telemetry is bypassed already\n`, "bypass", "telemetry")
	s.run(0, `nothing to change\nwarning: service telemetry is bypassed: .*`, "apply", "-f", file)
	s.run(0, `.*telemetry: BYPASSED: .*`, "status")
	s.run(0, `.*! bypass: service telemetry would get it, .*\n → process \d+ \(.*\), at 0.0.0.0:4739\n`, "explain", "udp", "192.0.2.7:2055", "127.0.0.1:4739")
	s.run(1, refused, "bypass", "--off", "telemetry")
	s.run(1, refused, "bypass", "--off", "--all")
	s.run(0, `telemetry is steered again\n`, "bypass", "--off", "telemetry", "--allow-outage")
	s.run(0, `telemetry is not bypassed\n`, "bypass", "--off", "telemetry")
	s.run(0, `{\n.*"result": ".*`, "explain", "tcp", "192.0.2.7:2055", "127.0.0.1:4739", "--json")
}

// A change announces the sessions to be reset. --rate 0 leaves them to weir steer reset.
func TestResetsOnTheCommandLine(t *testing.T) {
	if err := probe.DiagDestroy.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
	listen(t)
	s := session{t, root(t)}
	s.run(0, `create .*`, "apply", "-f", configFile(t, ", seed: 7"), "--allow-outage")
	var a netip.Addr // an address of this process's slot
	for i := byte(1); !a.IsValid(); i++ {
		if b := netip.AddrFrom4([4]byte{127, 3, 0, i}); spec.Assign(2)[spec.Bucket(7, b)] == 0 {
			a = b
		}
	}
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: a.AsSlice()}, Timeout: 30 * time.Second}
	d.SetMultipathTCP(false)
	c, err := d.DialContext(t.Context(), "tcp4", "127.0.0.1:4739")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err != nil { // the connection is accepted and has an owner
		t.Fatal(err)
	}
	line := `session of ` + a.String() + `: slot 0 → 1 of telemetry`
	move := []string{"steer", "move", "telemetry", "--device", a.String(), "--to", "1", "--allow-outage"}
	s.run(0, `would move `+a.String()+`: slot 0 → 1 of telemetry\nwould reset `+line+`\noutage: device .*`, append(move, "--dry-run")...)
	s.run(0, `would move `+a.String()+`: slot 0 → 1 of telemetry\n.*`, "steer", "drain", "telemetry", "--slot", "0", "--dry-run")
	s.run(0, ``, append(move, "--rate", "0")...)
	s.run(0, `.*telemetry: 1 TCP sessions are misplaced, not at their router's slot: run weir steer reset telemetry\n`, "status")
	s.run(0, `would reset `+line+`\n`, "steer", "reset", "telemetry", "--dry-run")
	s.run(0, `{\n  "service": "telemetry",.*"slot": 1.*`, "steer", "reset", "telemetry", "--dry-run", "--json")
	s.run(0, `reset `+line+` \(1 of 1\)\n`, "steer", "reset", "telemetry", "--rate", "100/s")
	s.run(0, ``, "steer", "reset", "telemetry")
}
