// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/users"
)

// FRR is a running bfdd.
type FRR struct {
	DataPlane string // address of its option --dplaneaddr, "" without one
	Peers     []Peer
}

// Peer is a BFD neighbour on a link, configured in bfdd or requested by a routing protocol.
type Peer struct {
	Addr      netip.Addr
	Interface string // "" if bfdd names none
	Up        bool
}

// vtyshTimeout is the limit of one vtysh.
const vtyshTimeout = 5 * time.Second

// maxAnswer is the limit of vtysh's answer, in bytes.
const maxAnswer = 4 << 20

// checkFRR rejects a process named bfdd of a user other than root, frr and this one: it could feed vtysh of root.
func checkFRR(pid int) error {
	id, err := users.OfProcess(pid)
	if err != nil {
		return err
	}
	uid := id.Credential.Uid
	if frr, err := users.Find("frr"); uid == 0 || uid == uint32(os.Geteuid()) || err == nil && uid == frr.Credential.Uid {
		return nil
	}
	return fmt.Errorf("it runs as user %d, not as root or frr: not asked", uid)
}

// answer keeps the output of a command up to a limit. It has no other method than Write: io.Copy would use ReadFrom.
type answer struct{ text []byte }

func (a *answer) Write(b []byte) (int, error) {
	if len(a.text)+len(b) > maxAnswer {
		return 0, fmt.Errorf("more than %d bytes", maxAnswer)
	}
	a.text = append(a.text, b...)
	return len(b), nil
}

// readFRR asks a bfdd for its neighbours, through vtysh.
func readFRR(ctx context.Context, pid int) (*FRR, error) {
	if err := checkFRR(pid); err != nil {
		return &FRR{}, err
	}
	args, err := pidfd.CommandLine(pid)
	if err != nil {
		return &FRR{}, err
	}
	f := &FRR{DataPlane: option(args, "--dplaneaddr")}
	home := option(args, "--vty_socket")
	if home == "" {
		home = filepath.Join("/var/run/frr", cmp.Or(option(args, "--pathspace"), option(args, "-N")))
	}
	ctx, cancel := context.WithTimeout(ctx, vtyshTimeout)
	defer cancel()
	tool, err := exec.LookPath("vtysh")
	if err != nil {
		return f, errors.New("vtysh is missing: install FRR's shell")
	}
	c := exec.CommandContext(ctx, tool, "--vty_socket", home, "-d", "bfdd", "-c", "show bfd peers json")
	c.WaitDelay = time.Second
	var out answer
	c.Stdout = &out
	if err := c.Run(); err != nil {
		return f, fmt.Errorf("vtysh --vty_socket %s: %w", home, err)
	}
	f.Peers, err = parsePeers(out.text)
	return f, err
}

// option returns the value of a long or short option: "--name value", "--name=value".
func option(args []string, name string) string {
	for i, a := range args {
		if value, ok := strings.CutPrefix(a, name+"="); ok {
			return value
		}
		if a == name && i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}

// parsePeers reads vtysh's answer. vtysh may print warnings before it.
func parsePeers(out []byte) (peers []Peer, err error) {
	at := slices.Index(out, '[')
	if at < 0 {
		return nil, errors.New("vtysh printed no list of peers")
	}
	var all []struct {
		Multihop  bool   `json:"multihop"`
		Peer      string `json:"peer"`
		Interface string `json:"interface"`
		Status    string `json:"status"`
	}
	if err := json.NewDecoder(strings.NewReader(string(out[at:]))).Decode(&all); err != nil {
		return nil, fmt.Errorf("answer of vtysh: %w", err)
	}
	for _, p := range all {
		a, err := netip.ParseAddr(p.Peer)
		if err != nil || p.Multihop {
			continue
		}
		peers = append(peers, Peer{a.WithZone(""), p.Interface, p.Status == "up"})
	}
	slices.SortFunc(peers, func(a, b Peer) int {
		return cmp.Or(cmp.Compare(a.Interface, b.Interface), a.Addr.Compare(b.Addr))
	})
	return peers, nil
}
