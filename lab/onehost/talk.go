// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"

	"github.com/weir-project/weir/clients/go/handoff"
)

// The stream of [Stream]. The client sends questions of 7 bytes, drawn by a seed known to both of its ends.
// The server answers each with 8 bytes, a hash of all questions so far. An answer is right only if no
// earlier byte was lost, doubled or changed, in either direction, by any server.
const (
	questionSize = 7
	answerSize   = 8
)

// talk is the position of a stream: the committed state of a member.
type talk struct{ hash, count uint64 }

const talkStart = 14695981039346656037

func restoreTalk(state []byte) talk {
	if len(state) != 16 {
		return talk{hash: talkStart}
	}
	return talk{binary.LittleEndian.Uint64(state), binary.LittleEndian.Uint64(state[8:])}
}

func (k *talk) state() []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, k.hash), k.count)
}

// next consumes the complete questions of b and returns the answers, and the number of remaining bytes.
func (k *talk) next(b []byte) (answers []byte, rest int) {
	for ; len(b) >= questionSize; b = b[questionSize:] {
		k.hash = hashOn(k.hash, b[:questionSize])
		k.count++
		answers = binary.LittleEndian.AppendUint64(answers, k.hash)
	}
	return answers, len(b)
}

// questions are drawn by a stream's seed.
type questions struct{ *rand.PCG }

func (q questions) next() (b [questionSize]byte) {
	var all [8]byte
	binary.LittleEndian.PutUint64(all[:], q.Uint64())
	copy(b[:], all[:])
	return b
}

// playStream runs an answering member: KEEPER SERVICE NAME ADDRESS.
func playStream(args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("%d arguments, want 4", len(args))
	}
	l, err := handoff.Listen(context.Background(), "tcp", args[3], handoff.Options{Keeper: args[0], Service: args[1], Name: args[2],
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	fmt.Print(sayReady)
	for {
		s, err := l.AcceptSession()
		if err != nil {
			return err
		}
		go func() {
			if err := answer(s); !errors.Is(err, handoff.ErrMoved) && !errors.Is(err, io.EOF) {
				fmt.Fprintln(os.Stderr, "ERROR:", err)
			}
			s.Close()
		}()
	}
}

// answer serves one stream. It does not commit after every read, so some work must be repeated after a
// crash.
func answer(s *handoff.Session) error {
	k := restoreTalk(s.State())
	if read, written := s.Positions(); read != k.count*questionSize || written != k.count*answerSize {
		return fmt.Errorf("the stream is at read %d, written %d; its state at question %d", read, written, k.count)
	}
	var partial []byte
	buf := make([]byte, 4000)
	for {
		n, err := s.Read(buf)
		if err != nil {
			return err
		}
		in := append(partial, buf[:n]...)
		answers, rest := k.next(in)
		partial = append([]byte(nil), in[len(in)-rest:]...)
		if _, err := s.Write(answers); err != nil {
			return err
		}
		if rand.IntN(3) > 0 {
			if err := s.CommitExcept(rest, k.state()); err != nil {
				return err
			}
		}
	}
}
