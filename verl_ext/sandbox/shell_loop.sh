# The supervisor of one bash shell: reads commands, has the shell run them, and answers with their output.
#
# Request, on standard input: a line `NONCE A B C TIMEOUT MOST LENGTH`, and LENGTH bytes of commands. A, B and C are parts
# of the nonce's base64 at the three alignments of base64. Answer: a line `NONCE BYTES HEAD TAIL` with the length of the
# output and blocks of the output in base64, and a line `NONCE HOW STATUS`. The last block holds the nonce twice: the
# output ends at the first.
#
# HOW   done: the command has ended. stopped: it was interrupted after TIMEOUT seconds, and the shell works. lost: it
#       could not be interrupted. over: it has ended the shell. broken: the shell works no longer.
#
# The shell is interactive, so that an interrupt ends a command, but not the shell; it has no terminal, no history and no
# line editor. It sources each command, because bash prints a new job's number in interactive code only. The shell is
# not told the nonce, and inherits no pipe of this program: it opens this program's pipes in /proc for one line each. Its
# programs can open them there, too, and so read the nonce.
#
# 3: requests. 6: reports to this program. 7: lines for the shell. 8: the command. 9: its output.

exec 2>/dev/null 3<&0 </dev/null 6<> <(:) 7<> <(:)
unset -v TMOUT PROMPT_COMMAND PS0 MAIL MAILPATH
# A training that was started in the background or by nohup ignores signals, and bash cannot undo this for its commands.
undo=(env --default-signal=HUP,INT,QUIT)
"${undo[@]}" true || undo=() # an env of before 2019
set -m # the shell gets a process group of its own, and interrupts are not ignored
{
  set -m
  "${undo[@]}" "$BASH" --noprofile --norc --noediting +o history -i <&8 6>&- 8<&- &
  set +m # `wait` would return when the shell is stopped
  wait $!
  printf 'over %d\n' $? >&6
} >/dev/null 3<&- 8</dev/fd/7 7>&- &
keeper=$!
set +m
printf '%s\n' 'set +o history +H; unset -v HISTFILE; shopt -u checkwinsize
trap -- '\''\builtin kill -INT $$'\'' RTMAX' >&7

declare -A parents starts
look() { # sets `parents` and `starts` (clock ticks) of all processes, and `shell`
  local stat line pid
  parents=() starts=() shell=
  for stat in /proc/[0-9]*/stat; do
    line=
    IFS= read -r -d '' line <"$stat"
    line=(${line##*) })
    pid=${stat#/proc/}
    pid=${pid%/stat}
    parents[$pid]=${line[1]:-0} starts[$pid]=${line[19]:-0}
    [[ ${line[1]} == "$keeper" ]] && shell=$pid
  done
}

descend() { # adds to `found`, a list of ids with blanks around each, all processes below
  local pid more=1
  while ((more)); do
    more=0
    for pid in "${!parents[@]}"; do
      [[ $found != *" $pid "* && $found == *" ${parents[$pid]} "* ]] && found+="$pid " more=1
    done
  done
}

# Interrupts the shell, and sends $1 to the command's processes: those that are not older than its collector, in clock ticks
# of 10 ms. Jobs in the background ignore SIGINT. The shell interrupts itself in a trap, because bash goes on with a list if
# it is interrupted during a program that catches the interrupt.
interrupt() {
  local pid found=' '
  look
  for pid in "${!parents[@]}"; do
    [[ ${parents[$pid]} == "$shell" ]] && ((starts[$pid] >= ${starts[$collector]:-0})) && found+="$pid "
  done
  descend
  kill -RTMAX $shell # first, or it would go on with the next command of a list
  kill -"$1" $found
}

end() {
  local found=" $keeper "
  look
  descend
  kill -KILL $found
}
trap end EXIT
trap exit HUP INT TERM

collect() { # copies the pipe's head and tail to the answer; then empties the pipe for jobs in the background
  local LC_ALL=C IFS=, chunk size length=0 half=$((most / 2 + 64)) in_head=0 in_tail=0 first=0
  local -a head=() tail=() sizes=()
  exec 3<&- 7>&- 8<&-
  while chunk=$(dd bs=65536 count=1 | base64 -w 0) && [[ $chunk ]]; do
    size=$((${#chunk} / 4 * 3))
    [[ $chunk == *== ]] && ((size--))
    [[ $chunk == *= ]] && ((size--))
    ((length += size))
    if ((in_head < half)); then
      head+=("$chunk")
      ((in_head += size))
    else
      tail+=("$chunk")
      sizes+=("$size")
      ((in_tail += size))
      while ((in_tail - sizes[first] >= half)); do
        ((in_tail -= sizes[first]))
        unset -v "tail[first]" "sizes[first]"
        ((first++))
      done
    fi
    [[ $chunk == *"$a"* || $chunk == *"$b"* || $chunk == *"$c"* ]] && break
  done
  printf '%s %d %s, %s,\n' "$nonce" "$length" "${head[*]}" "${tail[*]}"
  printf 'collected\n' >&6
  exec cat >/dev/null 6>&-
}

next_report() { # seconds; sets `report`, whose parts may come one by one
  local part=
  IFS= read -r -t "$1" -u 6 part
  local code=$?
  report+=$part
  return $code
}

await() { # seconds; sets `how` and `status` when the command has ended
  report=$unread
  while next_report "$1"; do
    unread=
    case $report in
      over\ *) how=over status=${report#over } && return 0 ;;
      "done $count "*) status=${report##* } && return 0 ;;
      collected) exit ;; # the collector has ended before the command, so the output is lost
    esac
    report=
  done
  unread=$report
  return 1
}

count=0 status=0 unread=
while read -r nonce a b c timeout most length <&3; do
  read -r -t 0 -u 6 && exit # the shell has ended since
  exec 8< <(exec head -c "$length" <&3) 9> >(collect)
  collector=$!
  pipes=/proc/$$/fd
  ((status)) && printf '(\\builtin exit %d)\n' "$status" >&7 # what $? was
  printf '%s\n' "\\builtin source /dev/fd/250 250<$pipes/8 </dev/null >$pipes/9 2>&1" \
    "\\builtin printf 'done %d %d\\n' $((++count)) \$? >$pipes/6" >&7
  how=done
  if ! await "$timeout"; then
    how=lost
    for signal in INT KILL KILL; do
      interrupt "$signal"
      if await 1; then
        [[ $how == lost ]] && how=stopped
        break
      fi
    done
  fi
  IFS= read -r -N 1 -t 5 -u 8 && [[ $how == done ]] && how=broken # the shell did not read the command
  printf '%s%s' "$nonce" "$nonce" >&9
  exec 8<&- 9>&-
  until [[ $report == collected ]]; do
    report=$unread
    next_report 60 || exit
    unread=
  done
  printf '%s %s %d\n' "$nonce" "$how" "$status"
  [[ $how == done || $how == stopped ]] || exit
done
