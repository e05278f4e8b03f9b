// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/feature/filter/filtertest"
)

// rulesOfBatch is the number of expressions for each packet at once.
const rulesOfBatch = 20

func onSocket(c interface {
	SyscallConn() (syscall.RawConn, error)
}, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = f(int(fd)) })
	return errors.Join(err, inner)
}

// watch is a program at a location. All its rules count, and the counters show each match.
type watch struct {
	*location
	counter
	exprs []*expr.Expr
	want  []uint64 // so far
}

// sameVerdicts sends packets over a wire past programs at every hook at once, the same packets for all. It
// evaluates each packet with the interpreter as seen by each hook.
func (x *experiment) sameVerdicts(ctx context.Context) error {
	x.say("%d random expressions at all hooks at once, %d real packets: comparing the kernel's matches with the interpreter's",
		x.batches*rulesOfBatch, x.batches*x.each)
	w, err := newWorld(x.env, "verdicts", false)
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(x.env.Seed, 1))
	compared := 0
	for i := range x.batches {
		n, err := x.batch(ctx, w, r, i)
		if err != nil {
			return err
		}
		compared += n
	}
	x.result.Set("verdicts_compared", float64(x.result.Metrics["verdicts_compared"])+float64(compared))
	x.result.Set("verdict_mismatches", float64(x.mismatches))
	return nil
}

// batch compares one set of expressions. XDP on a device holds one program: native and generic take turns.
func (x *experiment) batch(ctx context.Context, w *world, r *rand.Rand, number int) (compared int, err error) {
	kinds := filtertest.Kinds{Costs: number%4 == 3}
	plain := randomExprs(r, kinds)
	kinds.Link = true
	link := randomExprs(r, kinds)
	skip := []string{"xdp-generic", "xdp"}[number%2]
	var watches []*watch
	for _, p := range locations() {
		if p.name == skip {
			continue
		}
		h := &watch{location: p, exprs: plain}
		if p.hook == compile.TC || p.hook == compile.XDP {
			h.exprs = link
		}
		remove, err := h.put(w, x.env.Root)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", p.name, err)
		}
		defer remove()
		watches = append(watches, h)
	}
	for range x.each {
		if ctx.Err() != nil {
			return compared, ctx.Err()
		}
		p := newPacket(r, w.macs, true)
		for _, h := range watches {
			compared += h.expect(p)
		}
		if err := w.send(p); err != nil {
			return compared, err
		}
		for _, h := range watches {
			wrong, err := h.check()
			if err != nil {
				return compared, err
			}
			x.mismatches += len(wrong)
			for _, i := range wrong {
				x.result.Note("%s: %s: the interpreter and the program disagree on packet %x", h.name, h.exprName(i), p.frame)
			}
		}
	}
	return compared, nil
}

func randomExprs(r *rand.Rand, k filtertest.Kinds) []*expr.Expr {
	out := make([]*expr.Expr, rulesOfBatch)
	for i := range out {
		out[i] = filtertest.Expr(r, k)
	}
	return out
}

// put attaches the program. Its first rule excludes packets sent by the kernel on its own. A socket drops
// everything, so its buffer never fills.
func (h *watch) put(w *world, pins string) (func(), error) {
	rules := []compile.Rule{{Name: "other", Match: expr.MustParse("not " + ours), Action: compile.Pass}}
	for i, e := range h.exprs {
		rules = append(rules, compile.Rule{Name: fmt.Sprint("r", i), Match: e, Action: compile.Count})
	}
	o := compile.Options{Hook: h.hook, Start: h.start}
	if strings.HasPrefix(h.name, "socket") {
		o.Default = compile.Drop
	}
	var prog *ebpf.Program
	prog, c, unload, err := load(rules, o)
	if err != nil {
		return nil, err
	}
	h.counter, h.want = c, make([]uint64, len(rules)+1)
	detach, err := h.attach(w, pins, prog)
	if err != nil {
		unload()
		return nil, err
	}
	return func() { detach(); unload() }, nil
}

// expect adds a packet's expected counts, and returns the number of compared expressions.
func (h *watch) expect(p *packet) int {
	if !h.takes(p) {
		return 0
	}
	seen := h.sees(p)
	for i, e := range h.exprs {
		if e.Eval(seen) {
			h.want[1+i]++
		}
	}
	h.want[len(h.want)-1]++
	return len(h.exprs)
}

// check waits until the counts are as expected, and returns the expressions with wrong counts. The actual
// counts are the expected ones from then on.
func (h *watch) check() (wrong []int, err error) {
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Microsecond) {
		last := time.Now().After(deadline)
		got, err := h.read()
		if err != nil {
			return nil, err
		}
		got[0] = h.want[0]
		if slices.Equal(got, h.want) {
			return nil, nil
		}
		if !last {
			continue
		}
		for i := range got {
			if got[i] != h.want[i] {
				wrong = append(wrong, i)
			}
		}
		h.want = got
		return wrong, nil
	}
}

func (h *watch) exprName(i int) string {
	if i > len(h.exprs) {
		return "arrival at the hook"
	}
	return h.exprs[i-1].String()
}
