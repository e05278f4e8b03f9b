// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/front"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestFrontCommands(t *testing.T) {
	nstest.NeedRoot(t)
	if err := kernel.Require(front.Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	root := nstest.BPFFS + "/front-command"
	if out, _, status := weir(t, "--root", root, "handoff", "front", "status"); status != 0 || !strings.Contains(out, "no front end is here") {
		t.Errorf("status %d: %s", status, out)
	}
	if _, errs, status := weir(t, "--root", root, "handoff", "front"); status != exitUsage || !strings.Contains(errs, "-f front.yaml") {
		t.Errorf("status %d: %s", status, errs)
	}
	file := filepath.Join(t.TempDir(), "front.yaml")
	cert, key, signers := peertest.NewAuthority(t).Files("front")
	text := fmt.Sprintf("devices: [lo]\nlisten: 127.0.0.1:7946\ntls: {certificate: %s, key: %s, signers: %s}\nservices:\n  talk: {number: 0, listen: [tcp 10.55.0.1:9000]}\n", cert, key, signers)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, errs, status := weir(t, "--root", root, "handoff", "front", "-f", file); status != exitFailed || !strings.Contains(errs, file+":1:1: hosts: there is none") {
		t.Errorf("status %d: %s", status, errs)
	}
	if err := os.WriteFile(file, []byte(text+"register: true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := nstest.Start(t, command("--root", root, "handoff", "front", "-f", file))
	var all []front.Status
	for end := time.Now().Add(60 * time.Second); len(all) == 0 || !all[0].Agent; time.Sleep(20 * time.Millisecond) {
		out, errs, status := weir(t, "--root", root, "handoff", "front", "status", "--json")
		if err := json.Unmarshal([]byte(out), &all); err != nil && out != "" {
			t.Fatalf("%v: %s", err, out)
		}
		if time.Now().After(end) {
			t.Fatalf("status %d: %s %s", status, out, errs)
		}
	}
	if _, errs, status := weir(t, "--root", root, "handoff", "front", "override", "talk", "192.0.2.1:5", "a"); status != exitFailed || !strings.Contains(errs, `no host "a" is known`) {
		t.Errorf("status %d: %s", status, errs)
	}
	p.Kill() // the data path stays
	if out, _, status := weir(t, "--root", root, "handoff", "front", "status"); status != 0 || !strings.Contains(out, "its agent does not answer") {
		t.Errorf("status %d: %s", status, out)
	}
	if _, errs, status := weir(t, "--root", root, "handoff", "front", "remove"); status != 0 {
		t.Errorf("status %d: %s", status, errs)
	}
	if out, _, _ := weir(t, "--root", root, "handoff", "front", "status"); !strings.Contains(out, "no front end is here") {
		t.Errorf("%s", out)
	}
}

// A partner that is connected and not heard is told with for how long.
func TestPartnerState(t *testing.T) {
	for want, p := range map[string]front.PairStatus{
		"connected":                                  {Connected: true},
		"! connected, but not heard for 4 s":         {Connected: true, Silent: 4.2},
		"! not connected for 12 s":                   {Silent: 12},
		"! not connected since the agent began":      {Silent: -1},
		"connected, and clients' packets come by it": {Connected: true, There: true},
	} {
		if got := partnerState(&p); got != want {
			t.Errorf("%+v: %q, want %q", p, got, want)
		}
	}
}
