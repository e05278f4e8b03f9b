// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// Keys of a probe, of a BFD session of weir.yaml and of a session handed over by bfdd.
var secretKeys = []string{"0123456789abcdef", "key of a session", "key of bfdd"}

// dumped is the output of playDump.
type dumped struct {
	Read  int      // maps and files
	Found []string // paths with a key
}

// playDump reads each map and file that this user can open below directories, and looks for secretKeys.
func playDump(dirs []string) error {
	var d dumped
	for _, dir := range dirs {
		_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return nil
			}
			content, err := dumpMap(path)
			if err != nil { // a record, or a link
				content, err = os.ReadFile(path)
			}
			if err != nil {
				return nil
			}
			d.Read++
			for _, key := range secretKeys {
				if bytes.Contains(content, []byte(key)) {
					d.Found = append(d.Found, fmt.Sprintf("%s: %s", path, key))
				}
			}
			return nil
		})
	}
	return json.NewEncoder(os.Stdout).Encode(d)
}

// dumpMap returns the values of a pinned map.
func dumpMap(path string) (out []byte, err error) {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	defer m.Close()
	perCPU := m.Type() == ebpf.PerCPUArray || m.Type() == ebpf.PerCPUHash || m.Type() == ebpf.LRUCPUHash
	key, err := m.NextKeyBytes(nil)
	for ; err == nil && key != nil; key, err = m.NextKeyBytes(key) {
		var value []byte
		var each [][]byte
		if perCPU && m.Lookup(key, &each) == nil {
			value = slices.Concat(each...)
		} else if !perCPU {
			value, _ = m.LookupBytes(key)
		}
		out = append(out, value...)
	}
	return out, nil // maps without keys, such as ring buffers, have no values
}

// dumpAs reads the pins and records as another user.
func (w world) dumpAs(cred syscall.Credential) (d dumped) {
	w.t.Helper()
	c := child("dump", w.Root.Path(), kernel.RecordDir)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &cred}
	out, err := c.Output()
	if err == nil {
		err = json.Unmarshal(out, &d)
	}
	if err != nil {
		w.t.Fatalf("%v: %s", err, out)
	}
	return d
}

// keysWorld is a host with every pin, and with secretKeys in use. member is in its group.
func keysWorld(t *testing.T) (w world, c *Config, member syscall.Credential) {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(secretKeys[1]), 0o600); err != nil {
		t.Fatal(err)
	}
	group, err := user.LookupGroup("games")
	if err != nil {
		t.Skip("need: group games:", err)
	}
	config := "group: games\n" + strings.Replace(everyPin(t), "multiplier: 3}", "multiplier: 3, key_file: "+key+"}", 1)
	w, c, _, _ = damagedWorldOf(t, config, kernel.TCXLink, kernel.NetfilterLink)
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	e, err := engine.OpenHanded(t.Context(), w.Root, ns, 5*time.Millisecond, engine.Handed{Text: []byte(`{"frr":"unix:/run/frr/bfd-dplane"}`)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	s := engine.Session{Config: bfd.Config{Discriminator: 4711, Multiplier: 3, DesiredTx: time.Second, RequiredRx: time.Second},
		Local: netip.MustParseAddr("fd00:13::1"), Peer: netip.MustParseAddr("fd00:13::9"), Ifindex: nstest.Ifindex(t, ns, "d1"),
		Key: &bfd.Key{Type: bfd.MeticulousSHA1, ID: 1, Secret: []byte(secretKeys[2])}}
	if err := e.Put(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	gid, err := strconv.ParseUint(group.Gid, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return w, c, syscall.Credential{Uid: nobody, Gid: uint32(gid)}
}

// A member of the group reads the records without the keys, and no pin: after an apply, an upgrade, and the recovery of a
// lost pin.
func TestGroupReadsNoKeys(t *testing.T) {
	w, c, member := keysWorld(t)
	if err := os.Chmod(nstest.BPFFS, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Chmod(nstest.BPFFS, 0o700) })
	check := func(when string) {
		t.Helper()
		if own := w.dumpAs(syscall.Credential{}); len(own.Found) != len(secretKeys) {
			t.Fatalf("%s: root reads %d maps and files, with keys in %q", when, own.Read, own.Found)
		}
		group := w.dumpAs(member)
		if group.Read == 0 {
			t.Errorf("%s: the group reads no record", when)
		}
		if len(group.Found) > 0 {
			t.Errorf("%s: the group reads keys: %q", when, group.Found)
		}
		t.Logf("%s: the group reads %d maps and files", when, group.Read)
	}
	check("after an apply")
	w.setGroup(int(member.Gid))
	check("with the group set again")
	for _, who := range []string{"reroute @liveness", "reroute @bfd"} {
		w.patch(w.dirOf(who), func(b []byte) { copy(b[metaObject:], bytes.Repeat([]byte{1}, 32)) })
	}
	if steps := w.upgrade(); len(steps) < 2 {
		t.Errorf("upgraded %q", steps)
	}
	check("after an upgrade")
	pins, err := filepath.Glob(filepath.Join(w.dirOf("reroute @liveness"), "map_*setups"))
	if err != nil || len(pins) != 1 {
		t.Fatalf("pins %q: %v", pins, err)
	}
	w.unpin(pins[0])
	w.apply(c)
	check("after the recovery of a pin")
}

// Without weir serve a member of the group learns whom to ask. With it, it reads all states.
func TestGroupIsToldOfKeys(t *testing.T) {
	w, _, member := keysWorld(t)
	if err := os.Chmod(nstest.BPFFS, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Chmod(nstest.BPFFS, 0o700) })
	alone := w.readAs(member, filepath.Join(socketDir(t), "absent.sock"))
	if len(alone.Errors) == 0 || !strings.Contains(alone.Errors[0], "run as root, or ask a running 'weir serve'") {
		t.Errorf("alone the group is told %q", alone.Errors)
	}
	s := w.serve()
	if served := w.readAs(member, s.socket); served.Reader != "host.remote" || len(served.Status.Services) == 0 {
		t.Errorf("the group reads by %s: %+v", served.Reader, served)
	}
}
