// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
)

// memory sets the memory of the processes between routers and collectors: their own share of their pages,
// and for weir also its maps.
func (x *experiment) memory(context.Context) error {
	for _, y := range x.ways {
		for _, p := range y.between {
			kb, err := proportional(p.PID)
			if err != nil {
				return err
			}
			name := map[string]string{"haproxy": "haproxy", "nfacctd": "tee"}[p.Name]
			if y.name == weir {
				name = "weir_serve"
			}
			x.result.Set("mem_mb_"+name, float64(kb)/1024)
		}
	}
	if x.way(weir) == nil {
		return nil
	}
	bytes, err := mapMemory(kernel.OpenRoot(x.env.Root), fmt.Sprint(x.way(weir).Inode()))
	x.result.Set("mem_mb_weir_maps", float64(bytes)/(1<<20))
	return err
}

// proportional returns the proportional set size of a process and its descendants in kB. Shared pages are
// divided among them.
func proportional(pid int) (kb int, err error) {
	for _, p := range lab.Family(pid) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", p))
		if err != nil && p != pid {
			continue // this child has ended: nfacctd forks one for every write
		}
		if err != nil {
			return 0, err
		}
		n, err := parsePss(b)
		if err != nil && p == pid {
			return 0, fmt.Errorf("memory of process %d: %w", p, err)
		}
		kb += n
	}
	return kb, nil
}

// parsePss parses proc_pid_smaps_rollup(5).
func parsePss(b []byte) (int, error) {
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "Pss:"); ok {
			return strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")))
		}
	}
	return 0, errors.New("no line Pss")
}

// mapMemory returns the kernel's charge for the maps of steering in a network namespace, in bytes.
func mapMemory(root *kernel.Root, scope string) (total uint64, err error) {
	instances, err := root.Instances("steer")
	if err != nil {
		return 0, err
	}
	for _, i := range instances {
		if i.Scope != scope {
			continue
		}
		o, err := root.Open(i)
		if err != nil {
			return 0, err
		}
		for _, m := range o.Maps {
			if info, err := m.Info(); err == nil {
				n, _ := info.Memlock()
				total += n
			}
		}
		o.Close()
	}
	return total, nil
}

// sameBuffers reports an error unless every collector has the same backlog as weir's. A comparison needs
// equal backlogs.
func (x *experiment) sameBuffers() error {
	for _, y := range x.ways {
		err := y.Do(func() error {
			sockets, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, States: 1 << unix.BPF_TCP_LISTEN})
			for _, s := range sockets {
				if p := s.Local.Port(); p >= port && p <= port+collectorsEach && s.SendQueue != backlog {
					return fmt.Errorf("the listener at %s of %s has a backlog of %d, want %d", s.Local, y.name, s.SendQueue, backlog)
				}
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
